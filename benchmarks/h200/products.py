"""The matrix products of one decoder layer and of the output head, by every kernel that the platform offers.

Each is timed as in a step: inside a graph, over the weights of several layers, so that none comes from the cache.
Printed are the card's own limits and, for each number of rows, the share of the limit that each kernel reaches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import shapes
import torch

from inferplane.api.linear import LinearShape
from inferplane.plugins import load_plugins

PREFIX = "RESULT "
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LAYERS = 8


def products(model: dict[str, int]) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) by name."""
    hidden, inner, head_dim = model["hidden_size"], model["intermediate_size"], model["head_dim"]
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    return {
        "qkv": (hidden, (heads + 2 * kv_heads) * head_dim),
        "o": (heads * head_dim, hidden),
        "gate_up": (hidden, 2 * inner),
        "down": (inner, hidden),
        "lm_head": (hidden, model["vocab_size"]),
    }


def time_s(run: Callable[[], object], device: torch.device) -> float:
    """Median time of one call, as a graph where the device has graphs."""
    if device.type != "cuda":
        run()
        times = []
        for _ in range(3):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    from triton.testing import do_bench

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return do_bench(graph.replay, warmup=10, rep=40, return_mode="median") / 1e3


def limits(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(bytes per second read, operations per second) of this card, on random data."""
    size = 2**30 if device.type == "cuda" else 2**20
    x = torch.randn(size, device=device).to(dtype)
    out = torch.empty_like(x)
    copy = 2 * x.nbytes / time_s(lambda: out.copy_(x), device)
    n = 8192 if device.type == "cuda" else 128
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    rate = 2 * n**3 / time_s(lambda: torch.mm(a, b, out=product), device)
    return copy, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    plugins = load_plugins()
    descriptor = plugins.select_device(args.device)
    device = torch.device("cuda" if args.device.startswith("cuda") else "cpu")
    dtype = torch.bfloat16
    byte_rate, operation_rate = limits(device, dtype)
    print(
        PREFIX
        + json.dumps({"copy_TBps": round(byte_rate / 1e12, 3), "TFLOPs": round(operation_rate / 1e12, 1)}),
        flush=True,
    )
    for name, (inner, outer) in products(shapes.SHAPES[args.model]).items():
        count = 1 if name == "lm_head" else LAYERS
        weights = [torch.randn(outer, inner, device=device).to(dtype) for _ in range(count)]
        shape = LinearShape(name, inner, outer, dtype, has_bias=False)
        for kernel in plugins.linear_kernels(descriptor):
            if kernel.unsupported_reason(shape, descriptor) is not None:
                continue
            multiplies = [kernel.prepare(weight, None) for weight in weights]
            shares = {}
            for rows in args.rows:
                x = torch.randn(rows, inner, device=device).to(dtype)
                num_bytes = 2 * (inner * outer + rows * (inner + outer))
                limit = max(num_bytes / byte_rate, 2 * rows * inner * outer / operation_rate)
                seconds = time_s(lambda: [multiply(x) for multiply in multiplies], device) / count  # noqa: B023
                shares[rows] = round(limit / seconds, 2)
            print(PREFIX + json.dumps({"product": name, "kernel": kernel.name, "share": shares}), flush=True)


if __name__ == "__main__":
    main()
