"""Root-mean-square norms (arXiv:1910.07467), alone, with the residual added before, and with the result in fp8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.launch import begin, options, require_unit_stride, warps_for
from inferplane_kernels_triton.quantize import Fp8Rows, store_in_fp8


@triton.jit(do_not_specialize=["inner"])
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scale_ptr, inner, x_outer, x_inner, residual_row, dim, eps,
    HAS_RESIDUAL: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program normalizes one row; row r lies at ``(r // inner) * x_outer + (r % inner) * x_inner``. Where GROUP is
    not 0, the result is in fp8, with a scale for so many columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < dim
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    begin(PDL)
    x = tl.load(x_ptr + (row // inner) * x_outer + (row % inner) * x_inner + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual_row_ptr = residual_ptr + row * residual_row + columns
        residual = tl.load(residual_row_ptr, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_row_ptr, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / dim + eps)
    normed = (wide * scale).to(x.dtype)
    out = (weight.to(tl.float32) * normed.to(tl.float32)).to(x.dtype)
    if GROUP > 0:
        store_in_fp8(out.to(tl.float32), out_ptr, scale_ptr, row, dim, BLOCK, GROUP)
    else:
        tl.store(out_ptr + row * dim + columns, out, mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """``weight * x / sqrt(mean(x²) + eps)`` over the last dimension, computed in float32.

    ``x: [..., dim]`` with contiguous rows; up to three dimensions may be a view, so that the heads of a packed
    projection are normalized where they lie. ``weight: [dim]``. Returns ``out``, contiguous, by default a new tensor.
    """
    require_unit_stride(x=x)
    x3 = x.unsqueeze(0) if x.dim() == 2 else x
    if x3.dim() != 3:
        x3 = x.reshape(1, -1, x.shape[-1])
    outer, inner, dim = x3.shape
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if outer * inner:
        _rms_norm[(outer * inner,)](
            x3, x3, weight, out, None, inner, x3.stride(0), x3.stride(1), 0, dim, eps,
            HAS_RESIDUAL=False, GROUP=0, BLOCK=triton.next_power_of_2(dim), PDL=pdl,
            **options(pdl, num_warps=warps_for(dim)),
        )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual += x``, in place and rounded to its dtype; returns ``(rms_norm(residual), residual)``.

    ``x, residual: [num_tokens, dim]`` with contiguous rows, ``weight: [dim]``.
    """
    require_unit_stride(x=x, residual=residual)
    num_tokens, dim = x.shape
    if out is None:
        out = torch.empty((num_tokens, dim), dtype=x.dtype, device=x.device)
    if num_tokens:
        _rms_norm[(num_tokens,)](
            x, residual, weight, out, None, 1, x.stride(0), 0, residual.stride(0), dim, eps,
            HAS_RESIDUAL=True, GROUP=0, BLOCK=triton.next_power_of_2(dim), PDL=pdl,
            **options(pdl, num_warps=warps_for(dim)),
        )  # fmt: skip
    return out, residual


def add_rms_norm_in_fp8(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    by_group: bool = False,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize_per_token` of what `add_rms_norm` makes, or `rms_norm` without a residual, and ``x + residual``.

    ``x, residual: [num_tokens, dim]`` with contiguous rows, ``weight: [dim]``. Returns ``[num_tokens, dim]``
    float8_e4m3fn, its scales as `quantize_per_token` does, and residual, which was changed in place, or x without one.
    """
    require_unit_stride(x=x)
    num_tokens, dim = x.shape
    total = x if residual is None else residual
    require_unit_stride(residual=total)
    out = Fp8Rows.empty(num_tokens, dim, x.device, by_group=by_group)
    if num_tokens:
        _rms_norm[(num_tokens,)](
            x, total, weight, out.codes, out.scale, 1, x.stride(0), 0, total.stride(0), dim, eps,
            HAS_RESIDUAL=residual is not None, **out.constants, PDL=pdl, **options(pdl, num_warps=warps_for(dim)),
        )  # fmt: skip
    return out.codes, out.scale, total
