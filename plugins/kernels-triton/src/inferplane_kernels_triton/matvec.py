"""One row times a weight: the linear layers of a single decoding request, which are as fast as the weight can be read.

A program reads a few whole rows of the weight in 16-byte loads, keeps its partial sums in registers for the whole row
and adds them up at its end. Fused before it: the residual add and the norm. Each program sees all of x anyway, so it
finds the norm's factor on the way and applies it to the sum, with nothing to wait for. Fused after it: bias, or the
gate times up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.activation import silu
from inferplane_kernels_triton.block_scale import PIECE, WeightScale, add_product, row_scales, scale_arguments
from inferplane_kernels_triton.launch import begin, options, require_unit_stride


@dataclass(frozen=True)
class MatvecConfig:
    """How the kernel is launched."""

    rows: int = 4
    """Rows of the weight in one program (pairs of rows where the weight is gate and up)."""
    columns: int = 1024
    """Columns that a program handles at a time."""
    num_warps: int = 4
    unroll: int = 2
    """Iterations whose loads are in flight together."""


@dataclass(frozen=True)
class NormBefore:
    """``x`` is normed before it is multiplied: by ``weight / sqrt(mean(x²) + eps)``, after adding the residual."""

    weight: torch.Tensor
    """[in_features]."""
    eps: float
    residual: torch.Tensor | None = None
    """[num_tokens, in_features], contiguous; not changed, because every program reads it."""
    residual_out: torch.Tensor | None = None
    """Where ``x + residual`` goes, rounded to its dtype; memory of its own, like the residual."""

    def check(self, x: torch.Tensor) -> None:
        """Raises ValueError where the parts do not fit together."""
        if (self.residual is None) != (self.residual_out is None):
            raise ValueError("residual and residual_out come together")
        for name, tensor in (("residual", self.residual), ("residual_out", self.residual_out)):
            if tensor is not None and (tensor.shape != x.shape or not tensor.is_contiguous()):
                raise ValueError(f"{name}: needs to be contiguous and of x's shape {tuple(x.shape)}")


@triton.jit
def _matvec(
    x_ptr, residual_ptr, residual_out_ptr, norm_ptr, weight_ptr, up_ptr, scale_ptr, bias_ptr, out_ptr, weight_row,
    num_out, eps,
    IN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SCALE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program makes ROWS outputs; where GATED, row r of gate and of up make output r."""
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    row_mask = rows < num_out
    row_starts = rows.to(tl.int64)[:, None] * weight_row
    scales = row_scales(0, rows, IN, SCALE_ROWS, SCALE_COLUMNS)
    up_scales = row_scales(0, num_out + rows, IN, SCALE_ROWS, SCALE_COLUMNS)
    width: tl.constexpr = COLUMNS // PIECE if SCALE_COLUMNS > 0 else COLUMNS
    acc = tl.zeros((ROWS, width), dtype=tl.float32)
    up_acc = tl.zeros((ROWS, width), dtype=tl.float32)
    squares = tl.zeros((COLUMNS,), dtype=tl.float32)
    # The weight is no earlier kernel's work: its first part is on its way while the kernel before this one finishes.
    columns = tl.arange(0, COLUMNS)
    mask = row_mask[:, None] & (columns < IN)[None, :]
    weight = tl.load(
        weight_ptr + row_starts + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
    )
    up = weight
    if GATED:
        up = tl.load(
            up_ptr + row_starts + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first"
        )
    begin(PDL)
    for start in tl.range(0, IN, COLUMNS, loop_unroll_factor=UNROLL):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < IN
        cells = row_starts + COLUMNS + columns[None, :]
        mask = row_mask[:, None] & (columns < IN - COLUMNS)[None, :]
        next_weight = tl.load(weight_ptr + cells, mask=mask, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + columns, mask=inside, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + columns, mask=inside, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
            if program == 0:
                tl.store(residual_out_ptr + columns, x, mask=inside)
        wide = x.to(tl.float32)
        if HAS_NORM:
            squares += wide * wide
            wide = wide * tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        acc = add_product(
            acc, weight, wide[None, :], scale_ptr, scales, row_mask, start, IN, HAS_SCALE, SCALE_COLUMNS, ROWS, COLUMNS
        )  # fmt: skip
        weight = next_weight
        if GATED:
            next_up = tl.load(up_ptr + cells, mask=mask, other=0.0, eviction_policy="evict_first")
            up_acc = add_product(
                up_acc, up, wide[None, :], scale_ptr, up_scales, row_mask, start, IN, HAS_SCALE, SCALE_COLUMNS, ROWS,
                COLUMNS,
            )  # fmt: skip
            up = next_up
    total = tl.sum(acc, axis=1)
    up_total = tl.sum(up_acc, axis=1)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / IN + eps)
        total *= factor
        up_total *= factor
    if HAS_SCALE and SCALE_COLUMNS == 0:
        total *= tl.load(scale_ptr + scales, mask=row_mask, other=0.0)
        if GATED:
            up_total *= tl.load(scale_ptr + up_scales, mask=row_mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
        if GATED:
            up_total += tl.load(bias_ptr + num_out + rows, mask=row_mask, other=0.0).to(tl.float32)
    if GATED:
        total = silu(total) * up_total
    tl.store(out_ptr + rows, total.to(out_ptr.dtype.element_ty), mask=row_mask)


def matvec(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: NormBefore | None = None,
    weight_scale: WeightScale = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: MatvecConfig = MatvecConfig(),
    pdl: bool = False,
) -> torch.Tensor:
    """``x @ weight.T`` for a single row, summed in float32.

    ``x: [1, in_features]``, ``weight: [out_features, in_features]`` of any floating dtype with contiguous rows,
    ``weight_scale: [out_features]`` float32 where the weight is quantized per channel, or a `BlockScale`,
    ``bias: [out_features]``. ``gated``: the first half of the weight is a gate, and the result is ``silu(gate) * up``,
    half as wide.
    Returns ``out``: [1, out_features], by default a new tensor in x's dtype.
    """
    require_unit_stride(x=x, weight=weight)
    num_out, in_features = weight.shape
    if x.shape != (1, in_features):
        raise ValueError(f"x has shape {tuple(x.shape)}, needs (1, {in_features})")
    if norm is not None:
        norm.check(x)
    if gated:
        num_out //= 2
    if out is None:
        out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    columns = max(PIECE.value, min(config.columns, triton.next_power_of_2(in_features)))
    scale, scale_constants = scale_arguments(weight_scale, weight)
    residual = norm.residual if norm else None
    _matvec[(triton.cdiv(num_out, config.rows),)](
        x, x if residual is None else residual, norm.residual_out if norm else None, norm.weight if norm else None,
        weight, weight[num_out:] if gated else weight, scale, bias, out,
        weight.stride(0), num_out, norm.eps if norm else 0.0,
        IN=in_features, HAS_RESIDUAL=residual is not None, HAS_NORM=norm is not None,
        **scale_constants, HAS_BIAS=bias is not None, GATED=gated, ROWS=config.rows, COLUMNS=columns,
        UNROLL=config.unroll, PDL=pdl, **options(pdl, num_warps=config.num_warps),
    )  # fmt: skip
    return out
