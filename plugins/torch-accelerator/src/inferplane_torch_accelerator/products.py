"""Which kernel multiplies a plain weight by how many rows, as far as it was measured on such a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from inferplane_kernels_triton.block_matmul import BlockMatmulConfig
from inferplane_kernels_triton.matvec import MatvecConfig
from inferplane_kernels_triton.skinny_matmul import (
    MAX_TOKENS,
    MatmulConfig,
    MatmulWorkspace,
)
from inferplane_torch_accelerator.launch import Launch

MANY_ROWS = 1024
"""From so many rows on a product is bound by arithmetic, and the library's choice of tiles matters."""

_FEW_ROWS = tuple(2**power for power in range(1, MAX_TOKENS.bit_length()))


@dataclass(frozen=True)
class ManyRowsConfig:
    """Into how many products one is cut, where the library multiplies the parts faster."""

    row_parts: int = 1
    """Of the rows of x."""
    column_parts: int = 1
    """Of the results, as gate and up."""


@dataclass(frozen=True)
class FewRowsChoice:
    config: MatmulConfig
    workspace: MatmulWorkspace | None


def for_one_row(weight: torch.Tensor, launch: Launch, *, is_gated: bool) -> MatvecConfig:
    kernel = "matvec_gated" if is_gated else "matvec"
    return launch.config(kernel, tuple(weight.shape), MatvecConfig(), weight)


def for_few_rows(weight: torch.Tensor, launch: Launch, *, is_gated: bool) -> dict[int, FewRowsChoice]:
    """By the number of rows, rounded up to a power of two, where the Triton kernel was measured to beat the library.

    Shapes that were not measured are the library's. Weights of one byte have entries of their own, for rows rounded to
    fp8.
    """
    kernel = "skinny_matmul_gated" if is_gated else "skinny_matmul"
    if weight.element_size() == 1:
        kernel += "_fp8"
    choices = {}
    for rows in _FEW_ROWS:
        config = launch.measured(kernel, (rows, *weight.shape), MatmulConfig(), weight)
        if config is not None:
            space = shared_workspace(weight.device, len(weight), config.splits) if config.splits > 1 else None
            choices[rows] = FewRowsChoice(config, space)
    return choices


_PROGRAMS = 96
"""At least so many should share a product; fewer leave most of a GPU without work."""


def few_rows_by_block(weight: torch.Tensor, width: int, launch: Launch, *, is_gated: bool) -> FewRowsChoice:
    """For up to ``width`` rows of a weight in fp8 with scales of blocks, which no library multiplies."""
    out_features, in_features = weight.shape
    num_out = out_features // 2 if is_gated else out_features
    tiles = -(-num_out // MatmulConfig.rows)
    splits = min(8, rounded_up(-(-_PROGRAMS // tiles)), max(1, in_features // 512))
    kernel = "skinny_matmul_gated_fp8_block" if is_gated else "skinny_matmul_fp8_block"
    config = launch.config(kernel, (width, out_features, in_features), MatmulConfig(splits=splits), weight)
    space = shared_workspace(weight.device, out_features, config.splits) if config.splits > 1 else None
    return FewRowsChoice(config, space)


def many_rows_by_block(weight: torch.Tensor, num_rows: int, launch: Launch) -> BlockMatmulConfig:
    """As was measured for just this shape: tiles that are right for many rows leave most of a GPU without work where
    there are fewer."""
    default = BlockMatmulConfig.default(num_rows, len(weight))
    return launch.measured("block_matmul", (num_rows, *weight.shape), default, weight) or default


def for_many_rows(weight: torch.Tensor, launch: Launch) -> ManyRowsConfig | None:
    """None where one product is as fast as any, or nothing was measured."""
    return launch.measured("many_rows", tuple(weight.shape), ManyRowsConfig(), weight)


def multiply_in_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: ManyRowsConfig,
) -> torch.Tensor:
    """``x @ weight.T + bias``, part by part into one result."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    weights = weight.chunk(config.column_parts)
    biases = [None] * len(weights) if bias is None else bias.chunk(config.column_parts)
    for rows, out_rows in zip(x.chunk(config.row_parts), out.chunk(config.row_parts)):
        for part, part_bias, target in zip(weights, biases, out_rows.chunk(config.column_parts, dim=1)):
            if part_bias is None:
                torch.mm(rows, part.t(), out=target)
            else:
                torch.addmm(part_bias, rows, part.t(), out=target)
    return out


def add_in_parts(
    total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, config: ManyRowsConfig | None
) -> torch.Tensor:
    """``total += x @ weight.T``, in one product for each part of the rows; returns ``total``."""
    parts = 1 if config is None else config.row_parts
    for rows, target in zip(x.chunk(parts), total.chunk(parts)):
        target.addmm_(rows, weight.t())
    return total


def rounded_up(num_rows: int) -> int:
    """To a power of two."""
    return 1 << max(0, num_rows - 1).bit_length()


@cache
def shared_workspace(device: torch.device, out_features: int, splits: int) -> MatmulWorkspace:
    """One for all layers of a shape: their products run one after another, in graphs as well."""
    return MatmulWorkspace.allocate(MAX_TOKENS, out_features, splits, device)
