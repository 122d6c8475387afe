"""Scales of blocks of a weight, and how a kernel multiplies by them on its way along the columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import triton
import triton.language as tl

PIECE = tl.constexpr(16)
"""Columns that are summed up before their scale multiplies them, where a row has several scales."""


@dataclass(frozen=True)
class BlockScale:
    """Of a weight ``[out, in]``: one scale for each block of ``rows`` times ``columns``, cut short at the ends."""

    scale: torch.Tensor
    """``[ceil(out / rows), ceil(in / columns)]`` float32, contiguous."""
    rows: int
    columns: int
    """A multiple of 16."""

    def constants(self, weight: torch.Tensor) -> dict[str, int]:
        """What a kernel is told. Raises ValueError where this is no scale of ``weight: [out, in]``."""
        want = (triton.cdiv(weight.shape[0], self.rows), triton.cdiv(weight.shape[1], self.columns))
        if self.scale.shape != want or not self.scale.is_contiguous():
            raise ValueError(f"scale has shape {tuple(self.scale.shape)}, needs {want}, contiguous")
        if self.columns % PIECE.value:
            raise ValueError(f"scales should be of a multiple of {PIECE.value} columns, not {self.columns}")
        return {"SCALE_ROWS": self.rows, "SCALE_COLUMNS": self.columns}


WeightScale: TypeAlias = torch.Tensor | BlockScale | None
"""``[out]`` float32 of a weight that is quantized by rows, or of blocks; None of a plain one."""


def scale_arguments(scale: WeightScale, weight: torch.Tensor) -> tuple[torch.Tensor | None, dict[str, int]]:
    """The tensor and constants that a kernel is told; ``SCALE_COLUMNS`` 0 stands for a whole row."""
    if isinstance(scale, BlockScale):
        return scale.scale, {"HAS_SCALE": True, **scale.constants(weight)}
    return scale, {"HAS_SCALE": scale is not None, "SCALE_ROWS": 1, "SCALE_COLUMNS": 0}


def columns_of_tile(columns: int, scale_columns: int) -> int:
    """At most as many, a power of two, so that no tile has columns of two scales; 0 stands for a whole row."""
    return min(columns, scale_columns & -scale_columns) if scale_columns else columns


@triton.jit
def row_scales(first_block, rows, IN: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr):
    """Where the scales of some rows begin; ``first_block`` is the matrix's place, in blocks of rows."""
    per_row: tl.constexpr = (IN + SCALE_COLUMNS - 1) // SCALE_COLUMNS if SCALE_COLUMNS > 0 else 1
    return (first_block + rows // SCALE_ROWS) * per_row


@triton.jit
def add_product(
    acc, weight, x, scale_ptr, starts, row_mask, start,
    IN: tl.constexpr, HAS_SCALE: tl.constexpr, SCALE_COLUMNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds ``weight: [ROWS, COLUMNS]`` from column ``start`` on, times ``x: [1, COLUMNS]``, to as many sums; where a
    row has several scales to a sum for each piece of a row. A row's only scale is left for the end."""
    product = weight.to(tl.float32) * x
    if HAS_SCALE and SCALE_COLUMNS > 0:
        product = tl.sum(tl.reshape(product, (ROWS, COLUMNS // PIECE, PIECE)), axis=2)
        columns = start + tl.arange(0, COLUMNS // PIECE) * PIECE
        places = starts[:, None] + (columns // SCALE_COLUMNS)[None, :]
        product *= tl.load(scale_ptr + places, mask=row_mask[:, None] & (columns < IN)[None, :], other=0.0)
    return acc + product


@triton.jit
def add_dot(acc, weight, x, scales, x_scale, row_mask, start, SCALE_COLUMNS: tl.constexpr):
    """Adds ``weight: [ROWS, COLUMNS]`` from column ``start`` on, times ``x: [COLUMNS, TOKENS]``. Where a row has
    several scales the columns share one, which multiplies what they add, and so does ``x_scale``; a row's only scale is
    left for the end."""
    weight = weight.to(x.dtype)
    if SCALE_COLUMNS > 0:
        scale = tl.load(scales + start // SCALE_COLUMNS, mask=row_mask, other=0.0)
        return acc + tl.dot(weight, x, input_precision="ieee") * (scale[:, None] * x_scale)
    else:
        return tl.dot(weight, x, acc, input_precision="ieee")
