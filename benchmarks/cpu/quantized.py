"""Products with quantized weights against what the machine can do and against bfloat16, measured in turn in one run.

    python benchmarks/cpu/quantized.py [--formats q4_1] [--rows 1 64 1024] [--dtype float32] [--repeats 5] [--out FILE]

For each weight of a model, each format and each number of rows: GB/s of packed weight, as a share of reading alone over
as many bytes, and GFLOP/s, as a share of the peak of products in registers. Beside it the same product by a bfloat16
weight. Weights lie in so many copies that none is in a core's own cache when its turn comes. Each repeat gives
everything its turn; figures are the first tenth of the calls, since others on a shared machine only ever add.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import call
from pathlib import Path
from typing import Any

import torch
from kernels import FOOTPRINT, MODELS, PEAK_ROUNDS, seconds, undisturbed

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native import int64, pointer
from inferplane_kernels_cpu.native_linear import NativeLinear
from inferplane_kernels_cpu.quantized import QuantizedProduct


@dataclass(frozen=True)
class Format:
    bits: int
    group: int
    has_minimum: bool = False
    is_wide: bool = False
    """Scales that need float32."""


FORMATS = {
    "q4_0": Format(4, 32),
    "q4_1": Format(4, 32, has_minimum=True),
    "q4_k": Format(4, 32, has_minimum=True, is_wide=True),
    "w4_128": Format(4, 128),
    "q6_k": Format(8, 16, is_wide=True),
    "q8_0": Format(8, 32),
    "w8": Format(8, 1 << 15, is_wide=True),
}
MODEL = "SmolLM2-135M"


def quantized(kind: Format, out_features: int, in_features: int) -> QuantizedProduct:
    width = in_features if kind.bits == 8 else -(-in_features // 2)
    codes = torch.randint(0, 256, (out_features, width), dtype=torch.uint8)
    scale = torch.rand(out_features, -(-in_features // kind.group)) * 0.01 + 1e-3
    scale = scale if kind.is_wide else scale.half()
    minimum = -8 * scale if kind.has_minimum else None
    return QuantizedProduct(
        codes,
        scale,
        minimum,
        None,
        in_features=in_features,
        bits=kind.bits,
        zero=0 if kind.has_minimum else 1 << (kind.bits - 1),
        group=kind.group,
    )


def measure(
    model: str, shape: str, name: str, all_rows: Sequence[int], repeats: int, dtype: torch.dtype
) -> list[dict[str, Any]]:
    out_features, in_features = MODELS[model][shape]
    first = quantized(FORMATS[name], out_features, in_features)
    copies = max(2, min(FOOTPRINT // first.num_bytes, 100))
    ours = [first] + [quantized(FORMATS[name], out_features, in_features) for _ in range(copies - 1)]
    plain_bytes = out_features * in_features * 2
    plain_copies = max(1, min(FOOTPRINT // plain_bytes, 100))
    plain = [
        NativeLinear(torch.randn(out_features, in_features).bfloat16(), None) for _ in range(plain_copies)
    ]
    read = native.kernel("read_memory", pointer, int64)
    spin = native.kernel("multiply_registers", int64, int64, returns=ctypes.c_double)
    memory = torch.ones(copies, first.num_bytes // 256 * 256, dtype=torch.uint8)
    found = []
    for num_rows in all_rows:
        x = torch.randn(num_rows, in_features, dtype=dtype)
        operations = 2 * num_rows * out_features * in_features
        turns = max(1, min(copies, int(1e11 / operations)))
        times: dict[str, list[float]] = {"ours": [], "read": [], "bf16": [], "per_operation": []}
        ours[0](x), plain[0](x)
        for _ in range(repeats):
            times["ours"] += seconds(call, [(product, x) for product in ours[:turns]])
            times["read"] += seconds(read, [(row.data_ptr(), memory.shape[1]) for row in memory])
            times["bf16"] += seconds(call, [(product, x.bfloat16()) for product in plain[:turns]])
            start = time.perf_counter()
            done = spin(64, PEAK_ROUNDS)
            times["per_operation"].append((time.perf_counter() - start) / done)
        ours_s, read_s, plain_s, per_operation = map(undisturbed, times.values())
        found.append(
            {
                "weight": f"{model} {shape}",
                "format": name,
                "rows": num_rows,
                "us": round(ours_s * 1e6, 1),
                "GBps": round(first.num_bytes / ours_s / 1e9, 2),
                "of_read": round(read_s / ours_s, 3),
                "GFLOPs": round(operations / ours_s / 1e9, 1),
                "of_peak": round(operations * per_operation / ours_s, 3),
                "bf16_us": round(plain_s * 1e6, 1),
                "times_bf16": round(plain_s / ours_s, 2),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--model", choices=MODELS, default=MODEL)
    parser.add_argument("--weights", nargs="+", choices=MODELS[MODEL], default=list(MODELS[MODEL]))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 512])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of activations")
    parser.add_argument("--threads", type=int, default=native.num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file to write, one line of JSON for each figure")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native.set_num_threads(args.threads)
    found = []
    for name in args.formats:
        for shape in args.weights:
            found += measure(args.model, shape, name, args.rows, args.repeats, getattr(torch, args.dtype))
    if args.out is not None:
        facts = {"level": native.level(), "threads": args.threads}
        args.out.write_text("".join(json.dumps(facts | each) + "\n" for each in found))


if __name__ == "__main__":
    main()
