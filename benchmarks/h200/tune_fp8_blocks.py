"""Finds how products by fp8 weights with a scale for each block of 128 × 128 are launched best, and times them.

    python3 benchmarks/h200/checkout.py -- python3 benchmarks/h200/tune_fp8_blocks.py --out DIR [--seconds 120]
    python3 benchmarks/h200/tune_fp8_blocks.py --adopt DIR/fp8_blocks.json

The first measures, in graphs over weights that together exceed the cache, the candidates of each kernel on rows that
are rounded already, but for a single one, which is timed as it is and as a rounded one. Then it times the layers, the
rounding of their input and the gate included, for 1, 32 and 8,192 rows: in bfloat16, in fp8 with a scale for each
output, and by blocks; with what torch's scaled product makes of either scales beside them. The second command puts what
was found into the table that `inferplane-kernels-cuda` ships.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measuring import Measuring, adopt, randn
from precompile import meta, precompile
from timing import num_buffers
from tune_products import SHAPES, Shape, fp8_configs

from inferplane_cuda.launch import LAUNCH
from inferplane_kernels_triton.block_matmul import BlockMatmulConfig, block_matmul
from inferplane_kernels_triton.block_scale import BlockScale
from inferplane_kernels_triton.matvec import MatvecConfig, matvec
from inferplane_kernels_triton.quantize import quantize_per_token
from inferplane_kernels_triton.skinny_matmul import MatmulConfig, MatmulWorkspace, skinny_matmul
from inferplane_torch_accelerator.dense_multiply import DenseMultiply
from inferplane_torch_accelerator.fp8_block_multiply import Fp8BlockMultiply
from inferplane_torch_accelerator.fp8_multiply import Fp8Multiply
from inferplane_torch_accelerator.fused_product import FusedProduct

FP8 = torch.float8_e4m3fn
ROWS = (1, 32, 8192)
MANY = [
    BlockMatmulConfig(tokens, rows, 128, together, num_warps, num_stages)
    for (tokens, rows, num_warps), together, num_stages in itertools.product(
        ((128, 128, 8), (64, 128, 4), (128, 64, 4), (64, 256, 8)), (8, 16), (3, 4)
    )
]
ONE = [
    MatvecConfig(*each)
    for each in (
        (4, 1024, 4, 2), (2, 2048, 4, 2), (4, 2048, 4, 2), (8, 1024, 4, 2), (8, 512, 2, 4), (4, 1024, 2, 4),
        (8, 2048, 8, 2), (16, 512, 4, 2), (2, 4096, 4, 1), (4, 4096, 8, 1), (16, 1024, 8, 2),
    )
]  # fmt: skip
"""rows, columns, warps and unrolled iterations"""
Config = MatvecConfig | MatmulConfig | BlockMatmulConfig


def configs(rows: int, *, gated: bool) -> list[Config]:
    """No tile has more than the 128 columns of a block."""
    if rows > 64:
        return [*MANY]
    few = [each for each in fp8_configs(gated=gated) if each.columns == 128]
    return [*ONE, *few] if rows == 1 else [*few]


def product(
    x: torch.Tensor,
    codes: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: BlockScale,
    space: MatmulWorkspace,
    gated: bool,
    config: Config,
) -> torch.Tensor:
    if isinstance(config, MatvecConfig):
        return matvec(x, weight, weight_scale=scale, gated=gated, config=config, pdl=True)
    if isinstance(config, BlockMatmulConfig):
        return block_matmul(codes, x_scale, weight, scale, config=config, pdl=True)
    return skinny_matmul(
        codes, weight, x_scale=x_scale, weight_scale=scale, gated=gated, out_dtype=torch.bfloat16, workspace=space,
        config=config, pdl=True,
    )  # fmt: skip


def launch(task: tuple[int, Shape, bool, Config]) -> None:
    """Rows, shape of the weight and whether it is gate and up."""
    rows, (out, inner), gated, config = task
    x_scale = meta(inner // 128, rows, dtype=torch.float32).T
    scale = BlockScale(meta(out // 128, inner // 128, dtype=torch.float32), 128, 128)
    space = MatmulWorkspace.allocate(64, out, 4, torch.device("meta"))
    x, weight = meta(rows, inner), meta(out, inner, dtype=FP8)
    product(x, x.to(FP8), x_scale, weight, scale, space, gated, config)


def measure(measuring: Measuring, rows: int, name: str, shape: Shape) -> None:
    (out, inner), gated = shape, name == "gate_up"
    plain = [randn(out, inner) for _ in range(min(8, num_buffers(out * inner)))]
    weights = [each.to(FP8) for each in plain]
    scale = BlockScale(torch.rand(out // 128, inner // 128, device="cuda"), 128, 128)
    by_output = torch.rand(out, device="cuda")
    x, key = randn(rows, inner), f"{rows}x{out}x{inner}"
    budget_s = 0.4 if rows > 64 else 0.04

    def time(what: str, calls: list[Callable[[], object]]) -> float:
        return measuring.time(f"{name} {key} {what}", calls, budget_s=budget_s)

    def layer(multiply: FusedProduct) -> Callable[[], object]:
        return partial(multiply.silu_and_mul if gated else multiply, x)

    def scaled(weight: torch.Tensor, x_scale: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(codes, weight.T, x_scale, scale, out_dtype=torch.bfloat16)

    codes, x_scale = quantize_per_token(x, by_group=True)
    space = MatmulWorkspace.allocate(64, out, 4, x.device)
    times = {
        config: time(
            str(config),
            [partial(product, x, codes, x_scale, each, scale, space, gated, config) for each in weights],
        )
        for config in configs(rows, gated=gated)
    }
    listed = [config for config in times if rows > 1 or isinstance(config, MatvecConfig)]
    best = min(listed, key=times.__getitem__)
    if times[best] < float("inf"):
        fewer = ("matvec" if rows == 1 else "skinny_matmul") + ("_gated" if gated else "") + "_fp8_block"
        kernel = "block_matmul" if rows > 64 else fewer
        measuring.keep(kernel, f"{out}x{inner}" if rows == 1 else key, best)
    row = quantize_per_token(x)[1], by_output.unsqueeze(0)
    found = {
        "bf16": time("bf16", [layer(DenseMultiply(each, None, LAUNCH)) for each in plain]),
        "by output": time(
            "by output", [layer(Fp8Multiply(each, by_output, None, LAUNCH)) for each in weights]
        ),
        "by block, as shipped": time(
            "by block, as shipped",
            [layer(Fp8BlockMultiply(each, scale, None, LAUNCH)) for each in weights],
        ),
        "best product alone": times[best],
        "best rounded product alone": min(
            each for config, each in times.items() if not isinstance(config, MatvecConfig)
        ),
        "torch by output, alone": time("torch by output", [partial(scaled, each, *row) for each in weights]),
        "torch by block, alone": time(
            "torch by block", [partial(scaled, each, x_scale, scale.scale.T) for each in weights]
        ),
    }
    print(
        json.dumps({"product": name, "shape": key, **{k: round(v, 1) for k, v in found.items()}}), flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("fp8-blocks-out"))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=120.0, help="of measuring, after compiling")
    parser.add_argument("--adopt", type=Path, help="a fp8_blocks.json to put into the shipped table")
    args = parser.parse_args()
    if args.adopt:
        adopt(args.adopt)
        return
    products = {name: shape for name, shape in SHAPES["llama-8b"].items() if name != "lm_head"}
    precompile(
        launch,
        [
            (rows, shape, name == "gate_up", config)
            for rows, (name, shape) in itertools.product(args.rows, products.items())
            for config in configs(rows, gated=name == "gate_up")
        ],
    )
    measuring = Measuring()
    measuring.start(args.seconds)
    for rows, (name, shape) in itertools.product(args.rows, products.items()):
        measure(measuring, rows, name, shape)
        torch.cuda.empty_cache()
    measuring.write(args.out / "fp8_blocks.json")


if __name__ == "__main__":
    main()
