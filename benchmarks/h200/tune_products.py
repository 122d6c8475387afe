"""Finds which products of llama-8b another kernel than the library's multiplies faster, and says so in a table.

    python3 benchmarks/h200/checkout.py -- python3 benchmarks/h200/tune_products.py --out DIR [--seconds 60]
    python3 benchmarks/h200/tune_products.py --adopt DIR/products.json

The first measures, in graphs over weights that together exceed the cache, the library against `skinny_matmul` for 2 to
64 rows, plain and gated, and one product against several for 8,192 rows. The second puts what it found into the table
that `inferplane-kernels-cuda` ships. Only what is at least 2 % faster than the library is listed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measuring import Measuring, adopt, randn
from timing import num_buffers

from inferplane_kernels_triton.activation import silu_and_mul
from inferplane_kernels_triton.skinny_matmul import MatmulConfig, MatmulWorkspace, skinny_matmul
from inferplane_torch_accelerator.products import ManyRowsConfig, multiply_in_parts

SHAPES = {
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "lm_head": (128256, 4096),
}
"""(out_features, in_features)"""
PADDED_ROWS = {32: (32,), 16: (16, 8, 4, 2), 64: (64,)}
"""Numbers of rows by the width that the kernel rounds them up to; the configuration is chosen at that width."""
CONFIGS = (
    (64, 128, 1, 4, 4),
    (64, 128, 4, 4, 4),
    (128, 128, 1, 4, 3),
    (32, 256, 1, 4, 4),
    (64, 128, 2, 4, 5),
    (128, 64, 4, 4, 5),
)
"""rows, columns, splits, warps and stages of a `MatmulConfig`"""
MANY_ROWS = 8192
LEAST_GAIN = 0.98


def measure_few_rows(measuring: Measuring, shape: tuple[int, int], width: int, *, gated: bool) -> None:
    out, inner = shape
    weights = [randn(out, inner) for _ in range(min(8, num_buffers(2 * out * inner)))]
    space = MatmulWorkspace.allocate(64, out, 4, weights[0].device)
    kernel = "skinny_matmul_gated" if gated else "skinny_matmul"

    def library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x, weight)
        return silu_and_mul(y) if gated else y

    def ours(x: torch.Tensor, config: MatmulConfig) -> list[Callable[[], object]]:
        return [
            partial(skinny_matmul, x, each, gated=gated, workspace=space, config=config) for each in weights
        ]

    x = randn(width, inner)
    configs = [MatmulConfig(*each) for each in CONFIGS if not (gated and each[0] == 128)]
    times = {
        each: measuring.time(f"{kernel} {width}x{out}x{inner} {each}", ours(x, each)) for each in configs
    }
    best = min(configs, key=times.__getitem__)
    for rows in PADDED_ROWS[width]:
        x, key = randn(rows, inner), f"{rows}x{out}x{inner}"
        plain = measuring.time(
            f"library {key} gated={gated}", [partial(library, x, each) for each in weights]
        )
        if measuring.time(f"best {key}", ours(x, best)) < LEAST_GAIN * plain < float("inf"):
            measuring.kernels.setdefault(kernel, {})[key] = dataclasses.asdict(best)


def measure_many_rows(measuring: Measuring, shape: tuple[int, int]) -> None:
    """A transposed weight is only printed: it would be a second copy, as single rows need the other."""
    out, inner = shape
    weight, x, key = randn(out, inner), randn(MANY_ROWS, inner), f"{out}x{inner}"
    plain = measuring.time(f"many {key} one product", [partial(torch.nn.functional.linear, x, weight)])
    times = {}
    for parts in ((1, 2), (2, 1), (2, 2), (4, 1)):
        config = ManyRowsConfig(*parts)
        times[config] = measuring.time(
            f"many {key} {config}", [partial(multiply_in_parts, x, weight, None, config)]
        )
    measuring.time(f"many {key} transposed", [partial(torch.mm, x, weight.t().contiguous())])
    best = min(times, key=times.__getitem__)
    if times[best] < LEAST_GAIN * plain < float("inf"):
        measuring.kernels.setdefault("many_rows", {})[key] = dataclasses.asdict(best)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("products-out"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--adopt", type=Path, help="a products.json to put into the shipped table")
    args = parser.parse_args()
    if args.adopt:
        adopt(args.adopt)
        return
    measuring = Measuring(args.seconds)
    for name in ("gate_up", "down", "qkv", "o"):
        measure_many_rows(measuring, SHAPES[name])
    for width, (name, shape) in itertools.product(PADDED_ROWS, SHAPES.items()):
        measure_few_rows(measuring, shape, width, gated=name == "gate_up")
        torch.cuda.empty_cache()
    measuring.write(args.out / "products.json")


if __name__ == "__main__":
    main()
