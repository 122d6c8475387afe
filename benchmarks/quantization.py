"""Perplexity of one model in several forms, through the engine, on a fixed text in the public domain.

    python benchmarks/quantization.py path/to/plain-folder [--text FILE] [--max-tokens 2048] [--json FILE] [FORM …]

A form is ``bf16``; ``fp8``, ``int8``, ``int4`` or ``mxfp4``, rounded while loading; ``w4-64``, ``w4-128``, ``w8`` or
``w-mxfp4``, written by ``inferplane quantize`` first, with error feedback where ``-gptq`` is added; ``nf4``, written
by transformers with bitsandbytes, which has to be installed; a GGUF file of the same model, as
``path/to/Q4_K_M.gguf``; or bf16 with keys and values in another type, as in ``kv-fp8_e4m3``. Printed is a table with
the distance of each from bf16, which comes first, and how much of it is allowed; the exit status is 1 where it is more.
The text that is used when none is named is short: a percent more or less says nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

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
    "fp8": 4.0,
    "int4": 35.0,
    "w4-64": 35.0,
    "w4-64-gptq": 30.0,
    "w4-128": 45.0,
    "w4-128-gptq": 35.0,
    "nf4": 30.0,
    "Q8_0.gguf": 1.0,
    "Q6_K.gguf": 2.0,
    "Q5_K_M.gguf": 4.0,
    "Q4_K_M.gguf": 10.0,
    "mxfp4": 65.0,
    "w-mxfp4": 65.0,
    "w-mxfp4-gptq": 45.0,
    "kv-fp8_e4m3": 0.5,
    "kv-fp8_e5m2": 4.0,
    "kv-int8_per_token_head": 0.5,
}
"""Percent of the perplexity of bf16 by which a form of a model of 135 million weights may differ, of GGUF by the file's
name; why so much is in docs/quantization.md."""


def perplexity(model: str, text: str, num_tokens: int, window: int, **settings: Any) -> tuple[float, int]:
    """e to the mean of minus the log-probability of each token but the first of its window, and how many there were."""
    with LLM(model, max_model_len=window + 1, **settings) as llm:
        ids = llm.get_tokenizer().encode(text)[:num_tokens]
        windows = [ids[start : start + window] for start in range(0, len(ids) - 1, window)]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        prompts = [{"prompt_token_ids": part} for part in windows if len(part) > 1]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    entries = [entry for output in outputs for entry in output.prompt_logprobs or ()]
    logprobs = [entry.chosen.logprob for entry in entries if entry is not None]
    return math.exp(-sum(logprobs) / len(logprobs)), len(logprobs)


def write_nf4(folder: Path, out: Path) -> None:
    """Blocks of 64 with plain scales, as users of bitsandbytes have them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)


def measure(form: str, folder: Path, text: str, options: argparse.Namespace) -> dict[str, Any]:
    common = {"dtype": "bfloat16", "device": options.device, "max_num_seqs": 4, "kv_cache_bytes": 256 << 20}
    started = time.perf_counter()
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
        found, count = perplexity(str(model), text, options.max_tokens, options.window, **common)
    return {
        "engine": "inferplane", "model": folder.name, "case": f"perplexity_{Path(form).name}", "tokens": count,
        "perplexity": round(found, 4), "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("forms", nargs="*", default=FORMS)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, help="append one object for each form to this file")
    options = parser.parse_intermixed_args()
    text = options.text.read_text(encoding="utf-8")
    rows = []
    for form in options.forms:
        rows.append(measure(form, options.folder, text, options))
        print(json.dumps(rows[-1]), flush=True)
    if options.json is not None:
        with options.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    beyond = print_table({form: row["perplexity"] for form, row in zip(options.forms, rows)})
    if beyond:
        raise SystemExit(f"further from {options.forms[0]} than allowed: {', '.join(beyond)}")


def print_table(found: dict[str, float]) -> list[str]:
    """Perplexities by form, against the first one's. Returns the forms that are further from it than is allowed, or
    whose perplexity is no number."""
    base_form, base = next(iter(found.items()))
    print(f"\n| form | perplexity | against {base_form} | allowed |\n|---|---|---|---|")
    beyond = []
    for form, value in found.items():
        percent, allowed = 100 * (value / base - 1), ALLOWED.get(Path(form).name)
        print(f"| {form} | {value:.3f} | {percent:+.2f} % | {'' if allowed is None else f'± {allowed} %'} |")
        if not abs(percent) <= (math.inf if allowed is None else allowed):  # NaN is beyond anything
            beyond.append(form)
    return beyond


if __name__ == "__main__":
    main()
