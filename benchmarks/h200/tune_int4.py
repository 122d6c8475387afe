"""Finds how the kernels of four-bit weights are launched best for the products of llama-8b.

    python3 benchmarks/h200/checkout.py -- python3 benchmarks/h200/tune_int4.py --out DIR [--stage few_rows …]
    python3 benchmarks/h200/tune_int4.py --adopt DIR/int4.json

The first measures, in graphs over weights that together exceed the cache, groups of 128. ``few_rows``: `int4_matmul`
for 16, 32 and 64 rows; ``writing``: `dequantize_int4`, and the product of 64 to 512 rows by it; one row is
`tune_chain.py`'s. The second command puts what was found into the table that `inferplane-kernels-cuda` ships.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measuring import Measuring, adopt, randn
from precompile import meta, precompile
from timing import num_buffers
from tune_products import SHAPES, Shape

from inferplane_kernels_triton.int4_dequantize import DequantizeConfig, dequantize_int4
from inferplane_kernels_triton.int4_matmul import Int4MatmulConfig, int4_matmul
from inferplane_kernels_triton.int4_matrix import Int4Matrix
from inferplane_kernels_triton.skinny_matmul import MatmulWorkspace

GROUP = 128
PRODUCTS = {name: shape for name, shape in SHAPES["llama-8b"].items() if name != "lm_head"}
"""The head stays plain."""
FEW_ROWS = [
    Int4MatmulConfig(rows, splits, warps)
    for (rows, warps), splits in itertools.product(
        ((64, 4), (128, 4), (128, 8), (64, 2), (32, 1)), (1, 2, 4, 8)
    )
]
WIDTHS = (16, 32, 64)
WRITING = [
    DequantizeConfig(*each) for each in ((8, 8, 4), (4, 8, 4), (8, 16, 8), (2, 32, 4), (16, 8, 8), (4, 4, 4))
]


def few_rows_configs(out: int) -> list[Int4MatmulConfig]:
    """With as many programs as may occupy the card."""
    return [each for each in FEW_ROWS if 96 <= out // each.rows * each.splits <= 1024]


def meta_matrix(shape: Shape) -> Int4Matrix:
    out, inner = shape
    words = meta(out, inner // 8, dtype=torch.int32)
    return Int4Matrix(words, meta(out, inner // GROUP), None, None, inner, GROUP)


def matrices(shape: Shape) -> list[Int4Matrix]:
    out, inner = shape

    def one() -> Int4Matrix:
        words = torch.randint(-(2**31), 2**31, (out, inner // 8), dtype=torch.int32, device="cuda")
        return Int4Matrix(words, randn(out, inner // GROUP), None, None, inner, GROUP)

    return [one() for _ in range(min(16, num_buffers(out * inner // 2)))]


def launch_few_rows(task: tuple[str, int, Int4MatmulConfig]) -> None:
    name, width, config = task
    shape = PRODUCTS[name]
    space = MatmulWorkspace.allocate(width, shape[0], config.splits, torch.device("meta"))
    int4_matmul(
        meta(width, shape[1]),
        meta_matrix(shape),
        gated=name == "gate_up",
        workspace=space,
        config=config,
        pdl=True,
    )


def launch_writing(task: tuple[str, DequantizeConfig]) -> None:
    shape = PRODUCTS[task[0]]
    dequantize_int4(meta_matrix(shape), meta(*shape), config=task[1], pdl=True)


def kernel_of(name: str, kernel: str) -> str:
    return f"{kernel}_gated" if name == "gate_up" else kernel


def measure_few_rows(measuring: Measuring, name: str, weights: list[Int4Matrix]) -> None:
    out, inner = PRODUCTS[name]
    for width in WIDTHS:
        x, times = randn(width, inner), {}
        for config in few_rows_configs(out):
            space = MatmulWorkspace.allocate(width, out, config.splits, x.device)
            launch = partial(
                int4_matmul, x, gated=name == "gate_up", workspace=space, config=config, pdl=True
            )
            times[config] = measuring.time(
                f"few rows {width} {name} {config}", [partial(launch, weight=each) for each in weights]
            )
        best = min(times, key=times.__getitem__)
        if times[best] < float("inf"):
            print(f"few rows {width} {name}: {times[best]:.1f} us by {best}", flush=True)
            measuring.keep(kernel_of(name, "int4_matmul"), f"{width}x{out}x{inner}", best)


def measure_writing(measuring: Measuring, name: str, weights: list[Int4Matrix]) -> None:
    out, inner = PRODUCTS[name]
    space, times = torch.empty((out, inner), dtype=torch.bfloat16, device="cuda"), {}
    for config in WRITING:
        launch = partial(dequantize_int4, out=space, config=config, pdl=True)
        times[config] = measuring.time(
            f"writing {name} {config}", [partial(launch, each) for each in weights]
        )
    best = min(times, key=times.__getitem__)
    if times[best] == float("inf"):
        return
    measuring.keep("int4_dequantize", f"{out}x{inner}", best)
    for rows in (64, 128, 256, 512):
        x = randn(rows, inner)

        def product(weight: Int4Matrix, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, dequantize_int4(weight, space, config=best, pdl=True))

        measuring.time(f"{rows} rows {name} written first", [partial(product, each, x) for each in weights])


Measure = Callable[[Measuring, str, list[Int4Matrix]], None]
STAGES: dict[str, list[Measure]] = {
    "writing": [measure_writing],
    "few_rows": [measure_few_rows],
}


def compile_candidates(stage: str) -> None:
    names = list(PRODUCTS)
    by_matmul = [(name, config) for name in names for config in few_rows_configs(PRODUCTS[name][0])]
    if stage == "few_rows":
        precompile(launch_few_rows, [(name, width, config) for name, config in by_matmul for width in WIDTHS])
    else:
        precompile(launch_writing, list(itertools.product(names, WRITING)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("int4-out"))
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each stage, compilation apart")
    parser.add_argument("--adopt", type=Path, help="an int4.json to put into the shipped table")
    args = parser.parse_args()
    if args.adopt:
        adopt(args.adopt)
        return
    measuring = Measuring()
    for stage in args.stage:
        compile_candidates(stage)
        measuring.start(args.seconds)
        for measure, name in itertools.product(STAGES[stage], PRODUCTS):
            measure(measuring, name, matrices(PRODUCTS[name]))
            torch.cuda.empty_cache()
        measuring.write(args.out / "int4.json")


if __name__ == "__main__":
    main()
