"""Activations in fp8, with a scale for each token, or for each group of its columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.launch import begin, options, require_unit_stride, warps_for

LARGEST = tl.constexpr(448.0)
"""The largest number of e4m3."""


X_GROUP = tl.constexpr(128)
"""Columns of a group."""


@triton.jit
def store_in_fp8(x, out_ptr, scale_ptr, row, dim, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Writes ``x: [BLOCK]`` float32, the row of a launch that has a program for each: the largest of GROUP numbers
    becomes the largest of e4m3. The scales of all rows for the same columns lie side by side."""
    columns = tl.arange(0, BLOCK)
    groups = tl.arange(0, BLOCK // GROUP)
    x = tl.reshape(x, (BLOCK // GROUP, GROUP))
    scale = tl.maximum(tl.max(tl.abs(x), axis=1) / LARGEST, 1e-12)
    # Division may round past the largest number, which has no neighbour but NaN.
    codes = tl.minimum(tl.maximum(x / scale[:, None], -LARGEST), LARGEST).to(out_ptr.dtype.element_ty)
    tl.store(scale_ptr + groups * tl.num_programs(0) + row, scale, mask=groups * GROUP < dim)
    tl.store(out_ptr + row * dim + columns, tl.reshape(codes, (BLOCK,)), mask=columns < dim)


@triton.jit
def _quantize(
    x_ptr, out_ptr, scale_ptr, x_row, dim, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr
):
    """One program quantizes one row."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_row + columns, mask=columns < dim, other=0.0).to(tl.float32)
    store_in_fp8(x, out_ptr, scale_ptr, row, dim, BLOCK, GROUP)


@dataclass(frozen=True)
class Fp8Rows:
    """Memory for rows in fp8, and the constants of a kernel that fills it."""

    codes: torch.Tensor
    """``[num_tokens, dim]`` float8_e4m3fn."""
    scale: torch.Tensor
    """``[num_tokens, 1]`` float32, contiguous, or ``[num_tokens, ceil(dim / 128)]`` with contiguous columns."""
    constants: dict[str, int]

    @classmethod
    def empty(cls, num_tokens: int, dim: int, device: torch.device, *, by_group: bool) -> Fp8Rows:
        block = max(X_GROUP.value, triton.next_power_of_2(dim))
        group = X_GROUP.value if by_group else block
        shape = (triton.cdiv(dim, group), num_tokens) if by_group else (num_tokens, 1)
        scale = torch.empty(shape, dtype=torch.float32, device=device)
        return cls(
            torch.empty((num_tokens, dim), dtype=torch.float8_e4m3fn, device=device),
            scale.T if by_group else scale,
            {"BLOCK": block, "GROUP": group},
        )


def quantize_per_token(
    x: torch.Tensor, *, by_group: bool = False, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x: [num_tokens, dim]`` as (``[num_tokens, dim]`` float8_e4m3fn, ``[num_tokens, 1]`` float32 scales).

    A token's largest number becomes the largest of e4m3; ``x`` is about the product of the two. With ``by_group`` each
    128 columns of a token have a scale of their own: ``[num_tokens, ceil(dim / 128)]``, with contiguous columns.
    """
    require_unit_stride(x=x)
    num_tokens, dim = x.shape
    out = Fp8Rows.empty(num_tokens, dim, x.device, by_group=by_group)
    if num_tokens:
        _quantize[(num_tokens,)](
            x, out.codes, out.scale, x.stride(0), dim,
            **out.constants, PDL=pdl, **options(pdl, num_warps=warps_for(dim)),
        )  # fmt: skip
    return out.codes, out.scale


def group_stride(codes: torch.Tensor, scale: torch.Tensor) -> int:
    """Of scales by group. Raises ValueError where they are not those of ``codes: [num_tokens, dim]``."""
    want = (len(codes), triton.cdiv(codes.shape[1], X_GROUP.value))
    if scale.shape != want or (len(codes) > 1 and scale.stride(0) != 1):
        raise ValueError(
            f"x_scale has shape {tuple(scale.shape)} and strides {scale.stride()}, needs {want} and contiguous columns"
        )
    return scale.stride(1)
