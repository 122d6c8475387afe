"""Activations in fp8, with a scale for each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.launch import begin, options, require_unit_stride, warps_for

LARGEST = tl.constexpr(448.0)
"""The largest number of e4m3."""


@triton.jit
def fp8_of_row(x, FP8: tl.constexpr):
    """A row of float32 as (numbers of type FP8, their scale): the largest becomes the largest of e4m3."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=0) / LARGEST, 1e-12)
    # Division may round past the largest number, which has no neighbour but NaN.
    return tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST).to(FP8), scale


@triton.jit
def _quantize_per_token(x_ptr, out_ptr, scale_ptr, x_row, dim, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program quantizes one row."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < dim
    x = tl.load(x_ptr + row * x_row + columns, mask=mask, other=0.0).to(tl.float32)
    codes, scale = fp8_of_row(x, out_ptr.dtype.element_ty)
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + row * dim + columns, codes, mask=mask)


def quantize_per_token(x: torch.Tensor, *, pdl: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """``x: [num_tokens, dim]`` as (``[num_tokens, dim]`` float8_e4m3fn, ``[num_tokens, 1]`` float32 scales).

    A token's largest number becomes the largest of e4m3; ``x`` is about the product of the two.
    """
    require_unit_stride(x=x)
    num_tokens, dim = x.shape
    out = torch.empty((num_tokens, dim), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    if num_tokens:
        _quantize_per_token[(num_tokens,)](
            x, out, scale, x.stride(0), dim,
            BLOCK=triton.next_power_of_2(dim), PDL=pdl, **options(pdl, num_warps=warps_for(dim)),
        )  # fmt: skip
    return out, scale
