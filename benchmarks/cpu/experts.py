"""A mixture of experts by the native kernel against torch's operators, in turn in one run.

    python benchmarks/cpu/experts.py [--dtype bfloat16] [--tokens 1 8 64 512] [--repeats 9] [--out FILE]

GB/s are of the matrices of the experts that are used, as a share of reading alone over as many bytes. Torch's
operators are the op's reference: a loop over the experts. Figures are the quickest of the repeats, in each of which
everything has its turn: who else uses the machine can only add to a time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from inferplane.api.ops import OPS
from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native import int64, pointer
from inferplane_kernels_cpu.native_experts import fused_experts

MIXTURES = {"qwen3-moe tiny": (64, 4, 256, 128), "qwen3-30b-a3b layer": (128, 8, 2048, 768)}
"""Experts, those of a token, hidden and inner size."""
MOST_COPIES = 3


def seconds(call: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def measure(name: str, num_tokens: int, dtype: torch.dtype, repeats: int) -> dict[str, object]:
    num_experts, top_k, hidden, inner = MIXTURES[name]
    x = torch.randn(num_tokens, hidden).to(dtype)
    ids = torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].int()
    weights = torch.rand(num_tokens, top_k).softmax(-1)
    layers = [
        (
            (torch.randn(num_experts, 2 * inner, hidden) * hidden**-0.5).to(dtype),
            (torch.randn(num_experts, hidden, inner) * inner**-0.5).to(dtype),
        )
        for _ in range(MOST_COPIES)
    ]
    read = native.kernel("read_memory", pointer, int64)
    used_bytes = 3 * len(ids.unique()) * hidden * inner * dtype.itemsize
    memory = torch.ones(used_bytes // 256 * 256, dtype=torch.uint8)
    times: dict[str, list[float]] = {"ours": [], "torch": [], "read": []}
    for repeat in range(repeats):
        layer = layers[repeat % len(layers)]
        times["ours"].append(seconds(fused_experts, x, weights, ids, *layer))
        times["torch"].append(seconds(OPS["fused_experts"].reference, x, weights, ids, *layer))
        times["read"].append(seconds(read, memory.data_ptr(), memory.nbytes))
    ours_s, torch_s, read_s = map(min, times.values())
    return {
        "mixture": name,
        "num_tokens": num_tokens,
        "us": round(ours_s * 1e6, 1),
        "torch_us": round(torch_s * 1e6, 1),
        "times_torch": round(torch_s / ours_s, 2),
        "GBps": round(used_bytes / ours_s / 1e9, 2),
        "of_read": round(read_s / ours_s, 3),
        "GFLOPs": round(6 * num_tokens * top_k * hidden * inner / ours_s / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixtures", nargs="+", choices=MIXTURES, default=list(MIXTURES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--threads", type=int, default=native.num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="file to write, one line of JSON for each figure")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native.set_num_threads(args.threads)
    facts = {"level": native.level(), "threads": args.threads, "dtype": args.dtype}
    found = []
    for name in args.mixtures:
        for num_tokens in args.tokens:
            found.append(facts | measure(name, num_tokens, getattr(torch, args.dtype), args.repeats))
            print(json.dumps(found[-1]), flush=True)
    if args.out is not None:
        args.out.write_text("".join(json.dumps(each) + "\n" for each in found))


if __name__ == "__main__":
    main()
