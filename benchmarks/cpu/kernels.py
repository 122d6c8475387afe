"""Native products against what the machine can do at most and against torch's, measured in turn in one run.

    python benchmarks/cpu/kernels.py [--level amx] [--threads 2] [--repeats 7] [--out results.json]

For each weight of a model and each number of tokens: GB/s of weight read, as a share of reading alone over the same
memory, for few tokens; GFLOP/s, as a share of the peak of products in registers, for many. Weights lie in so many
copies that none is in a core's own cache when its turn comes. Everything has its turn in each repeat, and a figure is
that of the call which one in ten calls is faster than: who else uses the machine can only add to a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from operator import call
from pathlib import Path

import torch

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.linear import PackedLinear
from inferplane_kernels_cpu.native import int64, pointer
from inferplane_kernels_cpu.native_linear import NativeLinear
from inferplane_kernels_cpu.pages import move_weight

FOOTPRINT = 192 << 20
"""Bytes of weights that one measurement walks over."""

PEAK_ROUNDS = 8000
"""Of products in registers for each task that measures the peak: with fewer, to wake the threads takes as long."""

MODELS = {
    "SmolLM2-135M": {
        "qkv": (960, 576),
        "o": (576, 576),
        "gate_up": (3072, 576),
        "down": (576, 1536),
        "lm_head": (49152, 576),
    },
    "llama-1b": {
        "qkv": (3072, 2048),
        "o": (2048, 2048),
        "gate_up": (16384, 2048),
        "down": (2048, 8192),
        "lm_head": (128256, 2048),
    },
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 2000)


def seconds(call: Callable[..., object], arguments: list[tuple[object, ...]]) -> list[float]:
    """Of each call."""
    times = []
    for each in arguments:
        start = time.perf_counter()
        call(*each)
        times.append(time.perf_counter() - start)
    return times


def undisturbed(times: list[float]) -> float:
    return sorted(times)[len(times) // 10]


def measure(
    name: str,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    level: str,
    tokens: list[int],
    repeats: int,
) -> list[dict[str, object]]:
    num_bytes = out_features * in_features * dtype.itemsize
    copies = max(1, min(FOOTPRINT // num_bytes, 64))
    weights = [torch.randn(out_features, in_features).to(dtype) for _ in range(copies)]
    for weight in weights:
        move_weight(weight)  # as the engine does
    ours = [NativeLinear(weight, None, level) for weight in weights]
    torchs = [PackedLinear(weight, None) for weight in weights]
    read = native.kernel("read_memory", pointer, int64, at=level)
    spin = native.kernel("multiply_registers", int64, int64, at=level, returns=native.ctypes.c_double)
    memories = [(weight.data_ptr(), num_bytes // 256 * 256) for weight in weights]
    rows = []
    for num_tokens in tokens:
        x = torch.randn(num_tokens, in_features).to(dtype)
        operations = 2 * num_tokens * out_features * in_features
        turns = copies if operations * copies < 2e11 else max(1, int(2e11 / operations))
        times: dict[str, list[float]] = {"ours": [], "torch": [], "read": [], "peak": []}
        ours[0](x), torchs[0](x)
        for _ in range(repeats):
            times["ours"] += seconds(call, [(product, x) for product in ours[:turns]])
            times["read"] += seconds(read, memories)
            times["torch"] += seconds(call, [(product, x) for product in torchs[:turns]])
            times["peak"] += seconds(spin, [(32, PEAK_ROUNDS)] * 4)
        ours_s, torch_s, read_s, peak_s = (undisturbed(times[key]) for key in times)
        per_operation = peak_s / spin(32, PEAK_ROUNDS)
        rows.append(
            {
                "weight": name,
                "out_features": out_features,
                "in_features": in_features,
                "num_tokens": num_tokens,
                "us": round(ours_s * 1e6, 1),
                "torch_us": round(torch_s * 1e6, 1),
                "times_torch": round(torch_s / ours_s, 2),
                "GBps": round(num_bytes / ours_s / 1e9, 2),
                "read_GBps": round(num_bytes / read_s / 1e9, 2),
                "of_read": round(read_s / ours_s, 3),
                "GFLOPs": round(operations / ours_s / 1e9, 1),
                "peak_GFLOPs": round(1 / per_operation / 1e9, 1),
                "of_peak": round(operations * per_operation / ours_s, 3),
            }
        )
        row = rows[-1]
        print(
            f"{name:24} {out_features:6} × {in_features:<5} {num_tokens:5} tokens {row['us']:10} us "
            f"{row['GBps']:7} GB/s ({row['of_read']:.0%} of reading) {row['GFLOPs']:8} GFLOP/s "
            f"({row['of_peak']:.0%} of the peak)  torch {row['torch_us']:10} us (×{row['times_torch']})",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", default=None, help="instructions to use; the machine's best without it")
    parser.add_argument("--threads", type=int, default=native.num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--weights", nargs="*", default=None, help="names of weights, as qkv; all without it")
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native.set_num_threads(args.threads)
    level = args.level or native.level()
    dtype = getattr(torch, args.dtype)
    rows = []
    for model in args.models:
        for name, (out_features, in_features) in MODELS[model].items():
            if args.weights is None or name in args.weights:
                rows += measure(
                    f"{model} {name}", out_features, in_features, dtype, level, args.tokens, args.repeats
                )
    if args.out is not None:
        facts = {"level": level, "threads": args.threads, "dtype": args.dtype, "torch": torch.__version__}
        args.out.write_text(json.dumps(facts | {"products": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
