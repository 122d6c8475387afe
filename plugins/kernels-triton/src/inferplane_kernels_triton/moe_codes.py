"""The weights of experts in eight bits, and how their scales are found."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.block_scale import PIECE, columns_of_tile, row_scales
from inferplane_kernels_triton.launch import require_unit_stride


@dataclass(frozen=True)
class ExpertCodes:
    """``[num_experts, out, in]`` of ``codes * scale``."""

    codes: torch.Tensor
    """``[num_experts, out, in]`` int8, float8_e4m3fn or float8_e5m2, contiguous."""
    scale: torch.Tensor
    """``[num_experts, ceil(out / rows), ceil(in / columns)]`` float32, contiguous."""
    rows: int
    """Of one scale."""
    columns: int
    """Of one scale: all, or a multiple of 16."""

    def __post_init__(self) -> None:
        num_experts, out, width = self.codes.shape
        want = (num_experts, -(-out // self.rows), -(-width // self.columns))
        if self.scale.shape != want:
            raise ValueError(f"scale has shape {tuple(self.scale.shape)}, needs {want}")
        if self.columns < width and self.columns % PIECE.value:
            raise ValueError(f"scales should be of a multiple of {PIECE.value} columns, not {self.columns}")


@dataclass(frozen=True)
class WeightArguments:
    """What a kernel is told of a weight."""

    numbers: torch.Tensor
    """``[num_experts, out, in]``."""
    scale: torch.Tensor | None
    constants: dict[str, int]
    """``SCALE_COLUMNS`` 0 stands for a whole row."""

    def columns_of_tile(self, columns: int) -> int:
        """At most as many, so that no tile has columns of two scales."""
        return columns_of_tile(columns, self.constants["SCALE_COLUMNS"])


def weight_arguments(weight: torch.Tensor | ExpertCodes) -> WeightArguments:
    """Raises ValueError for rows that are not contiguous."""
    require_unit_stride(weight=weight if isinstance(weight, torch.Tensor) else weight.codes)
    if isinstance(weight, torch.Tensor):
        return WeightArguments(weight, None, {"HAS_SCALE": False, "SCALE_ROWS": 1, "SCALE_COLUMNS": 0})
    columns = weight.columns if weight.columns < weight.codes.shape[2] else 0
    constants = {"HAS_SCALE": True, "SCALE_ROWS": weight.rows, "SCALE_COLUMNS": columns}
    return WeightArguments(weight.codes, weight.scale, constants)


@triton.jit
def scale_starts(
    expert, rows, NUM_OUT, IN: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr
):
    """Where the scales begin of some rows of one expert's matrix, which has ``NUM_OUT``."""
    blocks = (NUM_OUT + SCALE_ROWS - 1) // SCALE_ROWS
    return row_scales(expert.to(tl.int64) * blocks, rows, IN, SCALE_ROWS, SCALE_COLUMNS)
