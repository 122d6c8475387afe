"""Finds which products of many rows quack multiplies faster than torch's library, and by which tiles.

    python3 benchmarks/h200/checkout.py --packages DIR -- python3 benchmarks/h200/tune_quack.py --out DIR [--seconds 60]
    python3 benchmarks/h200/tune_quack.py --adopt DIR/quack.json

The first measures, in graphs over weights that together exceed the cache, plain products and those through a gate, for
128 to 8,192 rows. A card that multiplies without a pause lowers its clock after a fraction of a second, and a step of
prompts is as long: each candidate runs for as much, the library before and behind all of them. Only what is at least
2 % faster than its mean is listed. The second puts what was found into the table that `inferplane-kernels-cuda` ships.
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

PLAIN = (Tiles(256, 128), Tiles(256, 192))
GATED = (Tiles(128, 192, pingpong=1), Tiles(128, 224))
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

    def time(what: str, calls: list[Callable[[], object]]) -> float:
        return measuring.time(f"{kernel} {key} {what}", calls, budget_s=0.6 if rows >= 2048 else 0.1)

    time("while the card warms", others)
    before = time("library", others)
    times = {each: time(str(each), ours(each)) for each in (GATED if is_gated else PLAIN)}
    plain = (before + time("library again", others)) / 2
    best = min(times, key=times.__getitem__)
    if max(times[best], plain) < float("inf"):
        measuring.keep(kernel, key, best if times[best] < LEAST_GAIN * plain else None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("quack-out"))
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=ROWS)
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
    for rows in sorted(args.rows, reverse=True):
        for name in sorted(SHAPES[args.model].keys() - {"lm_head", "router"}):
            measure(measuring, rows, SHAPES[args.model][name], is_gated=name == "gate_up")
            torch.cuda.empty_cache()
    measuring.write(args.out / "quack.json")


if __name__ == "__main__":
    main()
