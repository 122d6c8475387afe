"""Finds how the products of a decode step are launched best, each where it stands in a layer of llama-8b.

    python3 benchmarks/h200/checkout.py -- python3 benchmarks/h200/tune_chain.py --out DIR [--kernel int4 fp8 …]
    python3 benchmarks/h200/tune_chain.py --adopt DIR/chain.json

Alone, one launch behind the other, a product is measured in company that it does not have: what counts is how early it
starts while another kernel runs, and how soon the next one may. The first command therefore measures some layers as a
graph, attention included, with one product's configurations after another and the others at their best, twice: those
of one request, and of 32 with plain weights. The second puts what was found into the table that
`inferplane-kernels-cuda` ships.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measuring import Measuring, adopt, randn
from precompile import meta, precompile
from tune_products import NORMED, ONE_ROW, ONE_ROW_FP8, SHAPES

from inferplane_cuda.launch import LAUNCH
from inferplane_kernels_triton.decode_attention import (
    DecodeConfig,
    DecodeWorkspace,
    choose_num_splits,
    decode_attention,
)
from inferplane_kernels_triton.fp8_matvec import Fp8MatvecConfig, fp8_matvec
from inferplane_kernels_triton.int4_fixed_matvec import Int4FixedMatvecConfig, int4_fixed_matvec
from inferplane_kernels_triton.int4_matrix import Int4Matrix
from inferplane_kernels_triton.matvec import MatvecConfig, NormBefore, matvec
from inferplane_kernels_triton.norm import add_rms_norm
from inferplane_kernels_triton.rope_and_store import rope_and_store
from inferplane_kernels_triton.skinny_matmul import MAX_TOKENS, MatmulConfig, MatmulWorkspace, skinny_matmul

PRODUCTS = {name: SHAPES["llama-8b"][name] for name in ("gate_up", "down", "qkv", "o")}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4096, 32, 8, 128, 256
LAYERS = 12
"""Their weights, of four bits as well, are many times the second-level cache."""
GROUP = 128
SHARED_BYTES = 224 << 10
"""Of a processor, for one program's tiles."""
INT4 = [
    Int4FixedMatvecConfig(*each)
    for each in (
        (8, 1, 4), (8, 2, 4), (8, 3, 4), (8, 4, 4), (8, 7, 4), (8, 2, 8), (8, 4, 8), (8, 6, 4), (8, 2, 2),
        (4, 2, 4), (4, 3, 4), (4, 4, 4), (4, 6, 4), (4, 7, 4), (4, 8, 4), (4, 14, 4), (4, 4, 8), (4, 7, 8), (4, 8, 8),
        (4, 14, 8), (4, 4, 2), (2, 4, 4), (2, 7, 4), (2, 8, 4), (2, 10, 4), (2, 11, 4), (2, 14, 4), (2, 16, 4),
        (2, 7, 8), (2, 14, 8), (1, 11, 4), (1, 14, 4), (16, 1, 4), (16, 1, 8), (16, 2, 8), (16, 2, 4),
    )
]  # fmt: skip
"""rows, times and warps; among them those that make about as many programs as processors, or some times as many."""
MORE_FP8 = [
    Fp8MatvecConfig(*each) for each in ((2, 7, 4), (2, 8, 4), (4, 3, 4), (4, 4, 8), (2, 6, 8), (8, 3, 4))
]


FEW_ROWS = [
    MatmulConfig(rows, columns, splits, 8 if rows == 128 else 4, stages, prefetch)
    for rows, columns, splits, stages, prefetch in itertools.product(
        (32, 64, 128), (64, 128, 256), (1, 2, 4, 8), (3, 4, 6), (0, 4)
    )
    if rows * columns >= 64 * 64
]
"""rows, columns, splits, warps, stages, and tiles asked for before, of which the usable ones are tried"""


@dataclass(frozen=True)
class Kernel:
    """One of those that multiply few rows."""

    name: str
    multiply: Callable[..., torch.Tensor]
    """Takes x, what `draw` returns, and the options that all have."""
    draw: Callable[[Callable[..., torch.Tensor], int, int], tuple[Any, ...]]
    """A weight, by a function that returns a tensor of a shape."""
    default: Any
    candidates: list[Any]
    num_rows: int = 1

    def entry(self, product: str) -> tuple[str, tuple[int, ...]]:
        """Where the table has its configuration."""
        rows = () if self.num_rows == 1 else (self.num_rows,)
        return self.name + ("_gated" if product == "gate_up" else ""), (*rows, *PRODUCTS[product])


def few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: NormBefore | None,
    gated: bool,
    config: MatmulConfig,
    pdl: bool,
) -> torch.Tensor:
    """As the kernels of one row are called; the norm is a kernel of its own."""
    if norm is not None:
        assert norm.residual is not None
        x, _ = add_rms_norm(x, norm.residual, norm.weight, norm.eps, pdl=pdl)
    space = workspace(x.device)
    return skinny_matmul(x, weight, gated=gated, workspace=space, config=config, pdl=pdl)


@cache
def workspace(device: torch.device) -> MatmulWorkspace:
    return MatmulWorkspace.allocate(MAX_TOKENS, max(out for out, _ in PRODUCTS.values()), 8, device)


def plain(make: Callable[..., torch.Tensor], out: int, inner: int) -> tuple[Any, ...]:
    return (make(out, inner),)


def in_fp8(make: Callable[..., torch.Tensor], out: int, inner: int) -> tuple[Any, ...]:
    return make(out, inner).to(torch.float8_e4m3fn), make(out).float()


def in_int4(make: Callable[..., torch.Tensor], out: int, inner: int) -> tuple[Any, ...]:
    words = make(out, inner // 4).view(torch.int32)  # their bits, of any number, are codes
    return (Int4Matrix(words, make(out, inner // GROUP), None, None, inner, GROUP),)


KERNELS = {
    "bf16": Kernel("matvec", matvec, plain, MatvecConfig(), ONE_ROW),
    "fp8": Kernel("fp8_matvec", fp8_matvec, in_fp8, Fp8MatvecConfig(), [*ONE_ROW_FP8, *MORE_FP8]),
    "int4": Kernel("int4_fixed_matvec", int4_fixed_matvec, in_int4, Int4FixedMatvecConfig(), INT4),
    "bf16_32": Kernel("skinny_matmul", few_rows, plain, MatmulConfig(), FEW_ROWS, num_rows=32),
}


def candidates(kernel: Kernel, product: str) -> list[Any]:
    """Without those that would spill registers, do not fit into a processor's shared memory, or leave most of the
    processors without work."""
    out = PRODUCTS[product][0] // (2 if product == "gate_up" else 1)
    width = 2 if product == "gate_up" else 1
    if kernel.num_rows == 1:
        most = 16 if product in ("gate_up", "down") else 32
        return [each for each in kernel.candidates if each.rows * width <= most]
    return [
        each
        for each in kernel.candidates
        if (each.rows * width + kernel.num_rows) * each.columns * 2 * each.num_stages <= SHARED_BYTES
        and 110 <= out // each.rows * each.splits <= 1100
        and (each.splits == 1 or width == 1)
    ]


def launch(task: tuple[str, str, Any]) -> None:
    """A kernel by its name in `KERNELS`, a product, and a configuration."""
    kernel, name = KERNELS[task[0]], task[1]
    out, inner = PRODUCTS[name]
    x = meta(kernel.num_rows, inner)
    norm = NormBefore(meta(inner), 1e-5, x, meta(1, inner)) if name in NORMED else None
    weight = kernel.draw(meta, out, inner)
    kernel.multiply(x, *weight, norm=norm, gated=name == "gate_up", config=task[2], pdl=True)


class Chain:
    """Layers with weights and caches of their own, and one residual stream."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._weights = [
            {name: kernel.draw(randn, *shape) for name, shape in PRODUCTS.items()} for _ in range(LAYERS)
        ]
        rows = kernel.num_rows
        self._caches = [randn(2, 64 * rows, 16, KV_HEADS, HEAD_DIM) for _ in range(LAYERS)]
        self._hidden, self._norm, self._out = randn(rows, HIDDEN), randn(HIDDEN), randn(rows, HEADS, HEAD_DIM)
        self._residuals = [randn(rows, HIDDEN) for _ in range(2 * LAYERS + 1)]
        self._table = torch.randperm(64 * rows, device="cuda").int().view(rows, 64)
        self._lengths = torch.full((rows,), LENGTH, dtype=torch.int32, device="cuda")
        self._positions = self._lengths.long() - 1
        self._slots = self._table[:, (LENGTH - 1) // 16].long() * 16 + (LENGTH - 1) % 16
        self._angles = randn(1024, HEAD_DIM).float()
        shape = (rows * KV_HEADS, 1024)
        self._attention = LAUNCH.config("decode_attention", shape, DecodeConfig(), self._out)
        programs = 132 * self._attention.programs_per_processor
        self._splits = choose_num_splits(rows, KV_HEADS, 8192, programs)
        device = self._out.device
        self._space = DecodeWorkspace.allocate(rows, HEADS, KV_HEADS, HEAD_DIM, self._splits, device)

    def step(self, configs: dict[str, Any]) -> None:
        x = self._hidden
        for layer, weights in enumerate(self._weights):
            residuals = self._residuals[2 * layer : 2 * layer + 3]

            def product(
                name: str,
                x: torch.Tensor,
                *residual: torch.Tensor,
                weights: dict[str, tuple[Any, ...]] = weights,
            ) -> torch.Tensor:
                return self._kernel.multiply(
                    x,
                    *weights[name],
                    norm=NormBefore(self._norm, 1e-5, *residual) if residual else None,
                    gated=name == "gate_up",
                    config=configs[name],
                    pdl=True,
                )

            k, v = self._caches[layer]
            qkv = product("qkv", x, *residuals[:2])
            q = rope_and_store(qkv, k, v, self._slots, self._positions, self._angles, HEADS, pdl=True)
            decode_attention(
                q, k, v, self._table, self._lengths, 0.088, num_splits=self._splits, workspace=self._space,
                out=self._out, config=self._attention, pdl=True,
            )  # fmt: skip
            x = product("o", self._out.flatten(1))
            x = product("down", product("gate_up", x, *residuals[1:]))


def tune(measuring: Measuring, kernel: Kernel) -> None:
    chain = Chain(kernel)
    best = {}
    for name in PRODUCTS:
        best[name] = LAUNCH.config(*kernel.entry(name), kernel.default, chain._hidden)

    def micros(configs: dict[str, Any], what: str) -> float:
        return measuring.time(what, [partial(chain.step, configs)], budget_s=0.02) / LAYERS

    before = micros(best, f"{kernel.name} as shipped")
    for _ in range(2):
        for name in PRODUCTS:
            times = {
                each: micros(best | {name: each}, f"{kernel.name} {name} {each}")
                for each in candidates(kernel, name)
            }
            fastest = min(times, key=times.__getitem__)
            if times[fastest] < micros(best, f"{kernel.name} {name} at its best so far"):
                best[name] = fastest
    print(
        f"{kernel.name}: a layer took {before:.1f} us, and takes {micros(best, 'the best'):.1f}", flush=True
    )
    for name in PRODUCTS:
        table, shape = kernel.entry(name)
        measuring.keep(table, "x".join(map(str, shape)), best[name])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("chain-out"))
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kernel, compilation apart")
    parser.add_argument("--adopt", type=Path, help="a chain.json to put into the shipped table")
    args = parser.parse_args()
    if args.adopt:
        adopt(args.adopt)
        return
    measuring = Measuring()
    precompile(
        launch,
        [
            (key, name, config)
            for key in args.kernel
            for name in PRODUCTS
            for config in candidates(KERNELS[key], name)
        ],
    )
    for key in args.kernel:
        measuring.start(args.seconds)
        tune(measuring, KERNELS[key])
        torch.cuda.empty_cache()
        measuring.write(args.out / "chain.json")


if __name__ == "__main__":
    main()
