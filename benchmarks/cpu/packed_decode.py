"""Decode with packed weights beside decode with bfloat16 ones, in turns in one run.

    python benchmarks/cpu/packed_decode.py [--model M] [--quantization int4] [--batch-size 1] [--turns 5] [--out FILE]

A quantized model, which the demo model is, is loaded twice: packed, as ``auto`` has it, and dequantized to bfloat16. A
plain one is packed by ``--quantization``. Printed are the time of a step of both, each one's share of the time that
reading its own bytes takes, as `step.py` measures it, and how many times faster the packed one is. Figures are medians
of turns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from step import measure, watch

from inferplane import LLM

KV_BYTES = 256 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the demo model without it")
    parser.add_argument("--quantization", help="how a plain model is packed, as in int4")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON lines to write")
    args = parser.parse_args()
    plain = {} if args.quantization else {"quantization": "dequantize"}
    settings: dict[str, dict[str, Any]] = {
        "packed": {"quantization": args.quantization},
        "bf16": {"dtype": "bfloat16", **plain},
    }
    engines = {form: LLM(args.model, kv_cache_bytes=KV_BYTES, **each) for form, each in settings.items()}
    clocks = {form: watch(llm) for form, llm in engines.items()}
    turns: dict[str, list[dict[str, Any]]] = {form: [] for form in engines}
    for turn in range(args.turns + 1):
        for form, llm in engines.items():
            found = measure(llm, clocks[form], args.batch_size, args.prompt, args.steps)
            if turn:  # the first one warms up
                turns[form].append(found)
    fields = ("step_ms", "tok_s", "read_MB", "read_GB_s", "limit_ms", "of_limit")
    rows = [
        {"form": form, "n": args.batch_size, **{key: median(each[key] for each in found) for key in fields}}
        for form, found in turns.items()
    ]
    packed, bf16 = rows
    packed["times_bf16"] = round(bf16["step_ms"] / packed["step_ms"], 3)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if args.out is not None:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
