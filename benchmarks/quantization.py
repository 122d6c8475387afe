"""Perplexity of one model in several forms, through the engine, on a fixed text in the public domain.

    python benchmarks/quantization.py path/to/plain-folder [--text FILE] [--max-tokens N] [--json FILE] [FORM …]

A form is ``bf16``; ``fp8``, ``int8``, ``int4`` or ``mxfp4``, rounded while loading; ``w4-64``, ``w4-128``, ``w8`` or
``w-mxfp4``, written by ``inferplane quantize`` first, with error feedback where ``-gptq`` is added; ``nf4``, written
by transformers with bitsandbytes, which has to be installed; a GGUF file of the same model, as
``path/to/Q4_K_M.gguf``; or bf16 with keys and values in another type, as in ``kv-fp8_e4m3``. ``--dtype float32`` makes
activations, and what is called bf16, float32.

Printed is a table with the distance of each form from the first, the standard error of that distance, and how much of
it is allowed; the exit status is 1 where it is more by over two standard errors. The text that is used when none is
named is the whole of *Alice's Adventures in Wonderland* (Lewis Carroll, 1865), from the Canterbury corpus: a paragraph,
or a line of verse, in each line, without underscores, rows of stars and verses of later editions.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from inferplane import LLM, SamplingParams
from inferplane.api.kv import QUANTIZED_KV
from inferplane.config import EngineArgs
from inferplane.config.resolve import resolve
from inferplane.plugins import load_plugins
from inferplane.quantization.calibration import default_text
from inferplane.quantization.writer import scheme_named, write_quantized

TEXT = Path(__file__).with_name("carroll_1865.txt")
ONLINE = ("fp8", "int8", "int4", "mxfp4")
WRITTEN = {"w8": ("int8", None), "w4-64": ("int4", 64), "w4-128": ("int4", 128), "w-mxfp4": ("mxfp4", None)}
FEEDBACK = "-gptq"
KV = tuple(f"kv-{name}" for name in QUANTIZED_KV)
FORMS = ("bf16", "int8", "fp8", "w4-64", "w4-64-gptq", "w-mxfp4", "w-mxfp4-gptq", *KV)

ALLOWED = {
    "int8": 1.0,
    "w8": 1.0,
    "fp8": 2.0,
    "int4": 35.0,
    "w4-64": 35.0,
    "w4-64-gptq": 27.0,
    "w4-128": 45.0,
    "w4-128-gptq": 35.0,
    "nf4": 25.0,
    "Q8_0.gguf": 1.0,
    "Q6_K.gguf": 2.0,
    "Q5_K_M.gguf": 4.0,
    "Q4_K_M.gguf": 6.0,
    "mxfp4": 55.0,
    "w-mxfp4": 55.0,
    "w-mxfp4-gptq": 40.0,
    "kv-fp8_e4m3": 0.5,
    "kv-fp8_e5m2": 3.0,
    "kv-int8_per_token_head": 0.5,
}
"""Percent of the perplexity of bf16 by which a form of a model of 135 million weights may differ, of GGUF by the file's
name; why so much is in docs/quantization.md."""


def log_probabilities(model: str, windows: list[list[int]], **settings: Any) -> list[float]:
    """Of each token but the first of its window, given those before it in the window, in their order."""
    with LLM(model, max_model_len=max(map(len, windows)) + 1, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in windows], params, use_tqdm=False)
    entries = [entry for output in outputs for entry in output.prompt_logprobs or ()]
    return [entry.chosen.logprob for entry in entries if entry is not None]


def compare(found: list[float], base: list[float]) -> dict[str, float]:
    """The perplexity that log-probabilities make, by how many percent it is above that of ``base``, of the same tokens,
    and the standard error of this: a text with other tokens would have it differ by so much."""
    above = np.subtract(base, found)
    ratio = math.exp(above.mean())
    return {
        "perplexity": math.exp(-np.mean(found)),
        "percent": 100 * (ratio - 1),
        "standard_error": 100 * ratio * above.std(ddof=1) / math.sqrt(len(above)),
    }


def write_nf4(folder: Path, out: Path) -> None:
    """Blocks of 64 with plain scales, as users of bitsandbytes have them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)


def measure(form: str, folder: Path, windows: list[list[int]], options: argparse.Namespace) -> list[float]:
    """The `log_probabilities` of a form of the model in ``folder``, which it is made of first where need be."""
    common = {"dtype": options.dtype, "device": options.device}
    common |= {"max_num_seqs": 4, "kv_cache_bytes": 256 << 20}
    with tempfile.TemporaryDirectory() as scratch:
        model = folder
        if (plain := form.removesuffix(FEEDBACK)) in WRITTEN:
            name, group_size = WRITTEN[plain]
            calibration = None if plain == form else default_text()
            plugins = load_plugins()
            model = Path(scratch) / "model"
            config = resolve(EngineArgs(model=str(folder), device="reference"), plugins)
            scheme = scheme_named(name, group_size)
            write_quantized(config, plugins, scheme, model, calibration_text=calibration, progress=False)
        elif form == "nf4":
            model = Path(scratch) / "model"
            write_nf4(folder, model)
        elif form.endswith(".gguf"):
            model = Path(form)
        elif form in ONLINE:
            common["quantization"] = form
        elif form in KV:
            common["kv_cache_dtype"] = form.removeprefix("kv-")
        elif form != "bf16":
            raise SystemExit(
                f"{form} is no form; there are bf16, nf4, {', '.join((*ONLINE, *WRITTEN, *KV))} and GGUF files"
            )
        return log_probabilities(str(model), windows, **common)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("forms", nargs="*", default=FORMS)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, help="append one object for each form to this file")
    options = parser.parse_intermixed_args()
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    ids = tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.max_tokens]
    windows = [ids[start : start + options.window] for start in range(0, len(ids) - 1, options.window)]
    rows, base = [], None
    for form in options.forms:
        started = time.perf_counter()
        found = measure(form, options.folder, windows, options)
        base = base or found
        rows.append({
            "engine": "inferplane", "model": options.folder.name, "case": f"perplexity_{Path(form).name}",
            "dtype": options.dtype, "tokens": len(found), "window": options.window,
            **{name: round(value, 4) for name, value in compare(found, base).items()},
            "seconds": round(time.perf_counter() - started, 1),
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    beyond = print_table(dict(zip(options.forms, rows)))
    if beyond:
        raise SystemExit(f"further from {options.forms[0]} than allowed: {', '.join(beyond)}")


def print_table(found: dict[str, dict[str, Any]]) -> list[str]:
    """What `compare` says of each form against the first. Returns the forms that are further from it than is allowed by
    more than two standard errors, or whose perplexity is no number."""
    header = ("form", "perplexity", f"against {next(iter(found))}", "standard error", "allowed")
    print(f"\n| {' | '.join(header)} |\n{'|---' * len(header)}|")
    beyond = []
    for form, row in found.items():
        allowed = ALLOWED.get(Path(form).name, math.inf)
        bound = f"± {allowed} %" if math.isfinite(allowed) else ""
        cells = (
            form,
            f"{row['perplexity']:.3f}",
            f"{row['percent']:+.2f} %",
            f"{row['standard_error']:.2f} %",
            bound,
        )
        print(f"| {' | '.join(cells)} |")
        if not abs(row["percent"]) - 2 * row["standard_error"] <= allowed:  # NaN is beyond anything
            beyond.append(form)
    return beyond


if __name__ == "__main__":
    main()
