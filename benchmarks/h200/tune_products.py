"""Finds which products of a model another kernel than the library's multiplies faster, and says so in a table.

    python3 benchmarks/h200/checkout.py -- python3 benchmarks/h200/tune_products.py --out DIR [--stage one_row …]
    python3 benchmarks/h200/tune_products.py --adopt DIR/products.json

The first measures, in graphs over weights that together exceed the cache. ``one_row``: how `matvec` is launched best,
one launch starting during the one before as in a step, with the norm where a model has one; ``one_row_fp8``: the same
of `fp8_matvec`. ``few_rows``: the library against `skinny_matmul` for 2 to 64 rows, plain and gated, each behind a
norm as in a step, where the one starts during what is before it; ``few_rows_fp8``: `skinny_matmul` of rows rounded to
fp8 against torch's scaled product; ``many_rows``: one product against several
for 8,192 rows. Of these three only what is at least 2 % faster is listed.
The second command puts what was found into the table that `inferplane-kernels-cuda` ships. One row of llama-8b's
layers is `tune_chain.py`'s, which measures it among the kernels around it: run that last.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measuring import Measuring, adopt, randn
from precompile import meta, precompile
from timing import num_buffers

from inferplane_cuda.launch import LAUNCH
from inferplane_kernels_triton.activation import silu_and_mul
from inferplane_kernels_triton.fp8_matvec import Fp8MatvecConfig, fp8_matvec
from inferplane_kernels_triton.matvec import MatvecConfig, NormBefore, matvec
from inferplane_kernels_triton.norm import add_rms_norm_in_fp8, rms_norm
from inferplane_kernels_triton.quantize import quantize_per_token
from inferplane_kernels_triton.skinny_matmul import (
    MatmulConfig,
    MatmulWorkspace,
    skinny_matmul,
)
from inferplane_torch_accelerator.fp8_multiply import Fp8Multiply
from inferplane_torch_accelerator.launch import Launch
from inferplane_torch_accelerator.products import ManyRowsConfig, multiply_in_parts

Shape = tuple[int, int]
Weight = tuple[torch.Tensor, torch.Tensor | None]
"""With a scale for each row where it is in fp8."""
SHAPES: dict[str, dict[str, Shape]] = {
    "llama-8b": {
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "lm_head": (128256, 4096),
    },
    "qwen3-30b-a3b": {
        "qkv": (5120, 2048),
        "o": (2048, 4096),
        "router": (128, 2048),
        "lm_head": (151936, 2048),
    },
}
"""(out_features, in_features). Experts are `tune_experts.py`'s."""
NORMED = {"gate_up", "qkv", "lm_head"}
"""With the residual and the norm before them."""
ONE_ROW = [MatvecConfig(*each) for each in (
    (2, 2048, 8, 2), (4, 2048, 8, 2), (1, 2048, 4, 2), (2, 2048, 4, 2), (1, 4096, 4, 1), (2, 4096, 8, 1),
    (4, 4096, 8, 1), (4, 1024, 4, 2), (16, 512, 8, 2), (8, 1024, 8, 2), (1, 4096, 8, 1), (4, 512, 4, 4),
)]  # fmt: skip
"""rows, columns, warps and unrolled iterations of a `MatvecConfig`. Where a row is 4,096 long, a program with as many
columns has all its weights on their way before it waits for the kernel before it."""
ONE_ROW_FP8 = [
    Fp8MatvecConfig(*each)
    for each in itertools.product((1, 2, 4, 8), (1, 2, 4), (2, 4, 8))
    if each[0] * each[1] <= 16
]
"""rows, times and warps"""
PADDED_ROWS = {32: (32,), 16: (16, 8, 4, 2), 64: (64,)}
"""Numbers of rows by the width that the kernel rounds them up to; the configuration is chosen at that width."""
CONFIGS = [
    MatmulConfig(*each)
    for each in (
        (64, 128, 1, 4, 4), (64, 128, 2, 4, 5), (64, 128, 4, 4, 4), (32, 128, 1, 4, 4), (32, 256, 1, 4, 4),
        (32, 128, 2, 4, 4), (64, 256, 1, 4, 3), (16, 256, 1, 4, 4), (128, 64, 4, 4, 5), (128, 128, 1, 4, 3),
    )
]  # fmt: skip
"""rows, columns, splits, warps and stages of a `MatmulConfig`"""
PREFETCH = (4,)
"""Instead of the default, with the configuration that is best with it."""
FP8_ROWS = (32, 64, 8)
MANY_ROWS = 8192
LEAST_GAIN = 0.98


def launch_one_row(task: tuple[str, Shape, MatvecConfig | Fp8MatvecConfig]) -> None:
    """Name and shape of the weight; a configuration of fp8 means one in fp8."""
    name, (out, inner), config = task
    x = meta(1, inner)
    norm = NormBefore(meta(inner), 1e-5, x, meta(1, inner)) if name in NORMED else None
    one_row(x, meta_weight(out, inner, config), norm, name == "gate_up", config)


def meta_weight(out: int, inner: int, config: MatvecConfig | Fp8MatvecConfig) -> Weight:
    if isinstance(config, MatvecConfig):
        return meta(out, inner), None
    return meta(out, inner, dtype=torch.float8_e4m3fn), meta(out, dtype=torch.float32)


def one_row(
    x: torch.Tensor,
    weight: Weight,
    norm: NormBefore | None,
    gated: bool,
    config: MatvecConfig | Fp8MatvecConfig,
) -> torch.Tensor:
    numbers, scale = weight
    if scale is not None:
        return fp8_matvec(x, numbers, scale, norm=norm, gated=gated, config=config, pdl=True)
    return matvec(x, numbers, norm=norm, gated=gated, config=config, pdl=True)


def measure_one_row(measuring: Measuring, name: str, shape: Shape, *, fp8: bool) -> None:
    """The table's own configuration is among the candidates."""
    out, inner = shape
    gated = name == "gate_up"
    weights: list[Weight] = [
        (randn(out, inner), None) for _ in range(min(8, num_buffers((1 if fp8 else 2) * out * inner)))
    ]
    if fp8:
        scale = torch.ones(out, device="cuda")
        weights = [(each.to(torch.float8_e4m3fn), scale) for each, _ in weights]
    x, residual, total = (randn(1, inner) for _ in range(3))
    norm = NormBefore(randn(inner), 1e-5, residual, total) if name in NORMED else None
    kernel = ("fp8_matvec" if fp8 else "matvec") + ("_gated" if gated else "")
    default = Fp8MatvecConfig() if fp8 else MatvecConfig()
    shipped = LAUNCH.config(kernel, shape, default, weights[0][0])
    times = {}
    for config in dict.fromkeys([shipped, *(ONE_ROW_FP8 if fp8 else ONE_ROW)]):
        calls = [partial(one_row, x, each, norm, gated, config) for each in weights]
        times[config] = measuring.time(f"{kernel} {name} {config}", calls)
    best = min(times, key=times.__getitem__)
    if times[best] < float("inf"):
        measuring.keep(kernel, f"{out}x{inner}", best)


def few_rows_configs(width: int, *, gated: bool) -> list[MatmulConfig]:
    """Of a gated product, whose tiles are twice as large, the smaller ones."""
    return [each for each in CONFIGS if not (gated and each.rows * each.columns > 64 * 128)]


def launch_few_rows(task: tuple[int, Shape, bool, MatmulConfig]) -> None:
    """Width, shape of the weight and whether it is gate and up."""
    width, (out, inner), gated, config = task
    space = MatmulWorkspace.allocate(64, out, 4, torch.device("meta"))
    skinny_matmul(meta(width, inner), meta(out, inner), gated=gated, workspace=space, config=config, pdl=True)


def measure_few_rows(measuring: Measuring, shape: Shape, width: int, *, gated: bool) -> None:
    out, inner = shape
    weights = [randn(out, inner) for _ in range(min(8, num_buffers(2 * out * inner)))]
    space = MatmulWorkspace.allocate(64, out, 4, weights[0].device)
    kernel, norm = "skinny_matmul_gated" if gated else "skinny_matmul", randn(inner)

    def library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(rms_norm(x, norm, 1e-5, pdl=True), weight)
        return silu_and_mul(y, pdl=True) if gated else y

    def product(x: torch.Tensor, weight: torch.Tensor, config: MatmulConfig) -> torch.Tensor:
        x = rms_norm(x, norm, 1e-5, pdl=True)
        return skinny_matmul(x, weight, gated=gated, workspace=space, config=config, pdl=True)

    def ours(x: torch.Tensor, config: MatmulConfig) -> list[Callable[[], object]]:
        return [partial(product, x, each, config) for each in weights]

    x, times = randn(width, inner), {}

    def best_of(configs: list[MatmulConfig]) -> MatmulConfig:
        for each in configs:
            times[each] = measuring.time(f"{kernel} {width}x{out}x{inner} {each}", ours(x, each))
        return min(times, key=times.__getitem__)

    best = best_of(few_rows_configs(width, gated=gated))
    best = best_of([replace(best, prefetch=each) for each in PREFETCH])
    for rows in PADDED_ROWS[width]:
        x, key = randn(rows, inner), f"{rows}x{out}x{inner}"
        plain = measuring.time(
            f"library {key} gated={gated}",
            [partial(library, x, each) for each in weights],
        )
        seconds = measuring.time(f"best {key}", ours(x, best))
        if max(seconds, plain) < float("inf"):
            measuring.keep(kernel, key, best if seconds < LEAST_GAIN * plain else None)


def fp8_configs(*, gated: bool) -> list[MatmulConfig]:
    configs = itertools.product((64, 128), (128, 256), (1, 2, 4), (4, 6), (0, 4))
    tiles = [
        MatmulConfig(rows, columns, splits, 4, stages, prefetch)
        for rows, columns, splits, stages, prefetch in configs
        if rows * columns * stages * (2 if gated else 1) <= 160 << 10  # of shared memory
    ]
    return [each for each in tiles if each.splits == 1] if gated else tiles


def launch_few_rows_fp8(task: tuple[int, Shape, bool, MatmulConfig]) -> None:
    """Width, shape of the weight and whether it is gate and up."""
    width, (out, inner), gated, config = task
    space = MatmulWorkspace.allocate(64, out, 4, torch.device("meta"))
    codes, weight = (meta(rows, inner, dtype=torch.float8_e4m3fn) for rows in (width, out))
    scales = [meta(size, dtype=torch.float32) for size in (width, out)]
    skinny_matmul(
        codes, weight, x_scale=scales[0], weight_scale=scales[1], gated=gated, workspace=space, config=config,
        out_dtype=torch.bfloat16, pdl=True,
    )  # fmt: skip


def measure_few_rows_fp8(measuring: Measuring, name: str, shape: Shape, rows: int) -> None:
    """Either behind what it needs: a norm, or the rounding of its input."""
    out, inner = shape
    gated, normed = name == "gate_up", name in NORMED
    weights = [randn(out, inner).to(torch.float8_e4m3fn) for _ in range(min(8, num_buffers(out * inner)))]
    scale, norm = torch.rand(out, device="cuda"), randn(inner)
    x, residual = randn(rows, inner), randn(rows, inner)
    kernel, key = "skinny_matmul_gated_fp8" if gated else "skinny_matmul_fp8", f"{rows}x{out}x{inner}"
    space = MatmulWorkspace.allocate(64, out, 4, x.device)
    by_library = Launch("nvidia", pdl=LAUNCH.pdl)
    others = [Fp8Multiply(weight, scale, None, by_library) for weight in weights]

    def other(multiply: Fp8Multiply) -> object:
        if normed:
            return multiply.after_add_rms_norm(x, residual, norm, 1e-5, is_gated=gated)
        return multiply(x)

    def ours(weight: torch.Tensor, config: MatmulConfig) -> object:
        if normed:
            codes, x_scale, _ = add_rms_norm_in_fp8(x, residual, norm, 1e-5, pdl=True)
        else:
            codes, x_scale = quantize_per_token(x, pdl=True)
        return skinny_matmul(
            codes, weight, x_scale=x_scale, weight_scale=scale, gated=gated, workspace=space, config=config,
            out_dtype=torch.bfloat16, pdl=True,
        )  # fmt: skip

    plain = measuring.time(f"{kernel} {key} other", [partial(other, each) for each in others])
    times = {
        config: measuring.time(f"{kernel} {key} {config}", [partial(ours, each, config) for each in weights])
        for config in fp8_configs(gated=gated)
    }
    best = min(times, key=times.__getitem__)
    if max(times[best], plain) < float("inf"):
        measuring.keep(kernel, key, best if times[best] < LEAST_GAIN * plain else None)


def measure_many_rows(measuring: Measuring, shape: Shape) -> None:
    """A transposed weight is only printed: it would be a second copy, as single rows need the other."""
    out, inner = shape
    weight, x, key = randn(out, inner), randn(MANY_ROWS, inner), f"{out}x{inner}"
    plain = measuring.time(f"many {key} one product", [partial(torch.nn.functional.linear, x, weight)])
    times = {}
    for parts in ((1, 2), (2, 1), (2, 2), (4, 1)):
        config = ManyRowsConfig(*parts)
        times[config] = measuring.time(
            f"many {key} {config}",
            [partial(multiply_in_parts, x, weight, None, config)],
        )
    measuring.time(f"many {key} transposed", [partial(torch.mm, x, weight.t().contiguous())])
    best = min(times, key=times.__getitem__)
    if max(times[best], plain) < float("inf"):
        measuring.keep("many_rows", key, best if times[best] < LEAST_GAIN * plain else None)


def run(stage: str, shapes: dict[str, Shape], measuring: Measuring) -> None:
    if stage.startswith("one_row"):
        fp8 = stage == "one_row_fp8"
        configs = ONE_ROW_FP8 if fp8 else ONE_ROW
        precompile(launch_one_row, [(*each, config) for each in shapes.items() for config in configs])
        for name, shape in shapes.items():
            measure_one_row(measuring, name, shape, fp8=fp8)
            torch.cuda.empty_cache()
    elif stage == "few_rows_fp8":
        products = {name: shape for name, shape in shapes.items() if name not in ("lm_head", "router")}
        precompile(
            launch_few_rows_fp8,
            [
                (width, shape, name == "gate_up", config)
                for width, (name, shape) in itertools.product((16, 32, 64), products.items())
                for config in fp8_configs(gated=name == "gate_up")
            ],
        )
        for rows, (name, shape) in itertools.product(FP8_ROWS, products.items()):
            measure_few_rows_fp8(measuring, name, shape, rows)
            torch.cuda.empty_cache()
    elif stage == "many_rows":
        for name in sorted(shapes.keys() - {"lm_head", "router"}):
            measure_many_rows(measuring, shapes[name])
    else:
        precompile(
            launch_few_rows,
            [
                (width, shape, name == "gate_up", config)
                for width, (name, shape) in itertools.product(PADDED_ROWS, shapes.items())
                for config in few_rows_configs(width, gated=name == "gate_up")
            ],
        )
        for width, (name, shape) in itertools.product(PADDED_ROWS, shapes.items()):
            measure_few_rows(measuring, shape, width, gated=name == "gate_up")
            torch.cuda.empty_cache()


STAGES = ("one_row", "one_row_fp8", "many_rows", "few_rows", "few_rows_fp8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("products-out"))
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--seconds", type=float, default=80.0, help="of each stage")
    parser.add_argument("--adopt", type=Path, help="a products.json to put into the shipped table")
    args = parser.parse_args()
    if args.adopt:
        adopt(args.adopt)
        return
    measuring = Measuring()
    for stage in args.stage:
        measuring.start(args.seconds)
        run(stage, SHAPES[args.model], measuring)
        measuring.write(args.out / "products.json")


if __name__ == "__main__":
    main()
