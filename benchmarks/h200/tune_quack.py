"""Finds which products of many rows quack multiplies faster than torch's library, and by which tiles.

    python3 benchmarks/h200/checkout.py --packages DIR -- python3 benchmarks/h200/tune_quack.py --out DIR [--seconds 60]
    python3 benchmarks/h200/tune_quack.py --adopt DIR/quack.json

The first measures, in graphs over weights that together exceed the cache, plain products and those through a gate, for
128 to 8,192 rows; the library before and behind the candidates, as a card grows slower while it warms. Only what is at
least 2 % faster is listed. The second puts what was found into the table that `inferplane-kernels-cuda` ships.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measuring import Measuring, adopt, randn
from timing import num_buffers
from tune_products import LEAST_GAIN, SHAPES, Shape

from inferplane_cuda import cute_compiling, quack_library
from inferplane_cuda.launch import LAUNCH
from inferplane_cuda.quack_library import Tiles
from inferplane_cuda.quack_linear import ROWS
from inferplane_torch_accelerator.dense_multiply import DenseMultiply

PRODUCTS = {
    shape: name == "gate_up"
    for model in SHAPES.values()
    for name, shape in model.items()
    if name not in ("lm_head", "router")
}
"""Whether a product of such a weight goes through a gate."""
PLAIN = (Tiles(256, 192), Tiles(256, 128), Tiles(128, 192, pingpong=1), Tiles(128, 128, pingpong=1))
GATED = (Tiles(256, 192), Tiles(256, 128), Tiles(128, 192, pingpong=1), Tiles(128, 256), Tiles(128, 224))
"""Few, as each that is chosen is compiled once on a user's machine, for seconds."""


def measure(measuring: Measuring, rows: int, shape: Shape, *, is_gated: bool) -> None:
    out, inner = shape
    weights = [randn(out, inner) for _ in range(min(8, num_buffers(2 * out * inner)))]
    inputs = [randn(rows, inner) for _ in weights]
    kernel, key = "quack_gated" if is_gated else "quack", f"{rows}x{out}x{inner}"
    library = [DenseMultiply(weight, None, LAUNCH) for weight in weights]
    others = [partial(each.silu_and_mul if is_gated else each, x) for each, x in zip(library, inputs)]

    def ours(tiles: Tiles) -> list[Callable[[], object]]:
        return [
            partial(quack_library.product, x, weight, tiles, is_gated=is_gated)
            for x, weight in zip(inputs, weights)
        ]

    before = measuring.time(f"{kernel} {key} library", others)
    times = {
        each: measuring.time(f"{kernel} {key} {each}", ours(each)) for each in (GATED if is_gated else PLAIN)
    }
    plain = min(before, measuring.time(f"{kernel} {key} library again", others))
    best = min(times, key=times.__getitem__)
    if max(times[best], plain) < float("inf"):
        measuring.keep(kernel, key, best if times[best] < LEAST_GAIN * plain else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("quack-out"))
    parser.add_argument("--seconds", type=float, default=80.0, help="of measuring, after compiling")
    parser.add_argument("--adopt", type=Path, help="a quack.json to put into the shipped table")
    args = parser.parse_args()
    if args.adopt:
        adopt(args.adopt)
        return
    for tiles, is_gated in [*((each, False) for each in PLAIN), *((each, True) for each in GATED)]:
        quack_library.start_compiling(randn(512, 512), tiles, is_gated=is_gated)
    cute_compiling.wait()
    measuring = Measuring()
    measuring.start(args.seconds)
    for rows in reversed(ROWS):
        for shape, is_gated in PRODUCTS.items():
            measure(measuring, rows, shape, is_gated=is_gated)
            torch.cuda.empty_cache()
    measuring.write(args.out / "quack.json")


if __name__ == "__main__":
    main()
