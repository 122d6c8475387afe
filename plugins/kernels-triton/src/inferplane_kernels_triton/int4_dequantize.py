"""A 4-bit weight written out whole, for products of so many rows that a library's are worth the detour."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.int4_matrix import Int4Matrix, codes_at, e2m1_at, load_scales
from inferplane_kernels_triton.launch import begin, options


@dataclass(frozen=True)
class DequantizeConfig:
    """How the kernel is launched."""

    rows: int = 8
    """Rows of one program."""
    blocks: int = 8
    """Blocks of 128 columns of one program."""
    num_warps: int = 4


@triton.jit
def _dequantize(
    words_ptr, scale_ptr, zero_ptr, offset_ptr, out_ptr, num_out, num_blocks,
    IN: tl.constexpr, GROUP: tl.constexpr, E2M1: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program writes ROWS rows of BLOCKS blocks."""
    groups: tl.constexpr = (IN + GROUP - 1) // GROUP
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
    blocks = (tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS))[None, :, None]
    lanes = tl.arange(0, 16)[None, None, :]
    inside = (rows < num_out) & (blocks < num_blocks)
    cells = rows * (num_blocks * 16) + blocks * 16 + lanes
    words = tl.load(words_ptr + cells, mask=inside, other=0).to(tl.uint32, bitcast=True)
    begin(PDL)  # the kernel before may still read what was written here for it
    for place in tl.static_range(8):
        group = (blocks * 128 + place * 16) // GROUP
        at = rows * groups + group
        mask = inside & (group < groups)
        if E2M1:
            values = e2m1_at(words, place, tl.float32)
        else:
            values = codes_at(words, place).to(tl.int32).to(tl.float32) - 8.0
        if HAS_ZERO:
            values -= tl.load(zero_ptr + at, mask=mask, other=0).to(tl.float32)
        values *= load_scales(scale_ptr, at, mask)
        if HAS_OFFSET:
            values += tl.load(offset_ptr + at, mask=mask, other=0.0).to(tl.float32)
        columns = blocks * 128 + place * 16 + lanes
        tl.store(
            out_ptr + rows * IN + columns, values.to(out_ptr.dtype.element_ty), mask=inside & (columns < IN)
        )


def dequantize_int4(
    weight: Int4Matrix,
    out: torch.Tensor,
    *,
    config: DequantizeConfig = DequantizeConfig(),
    pdl: bool = False,
) -> torch.Tensor:
    """Writes ``weight`` into ``out: [out_features, in_features]``, contiguous, rounded once, from float32."""
    if out.shape != (weight.out_features, weight.in_features) or not out.is_contiguous():
        raise ValueError(
            f"out: needs to be contiguous, of shape {(weight.out_features, weight.in_features)}, not {tuple(out.shape)}"
        )
    num_blocks = weight.words.shape[1] // 16
    _dequantize[(triton.cdiv(weight.out_features, config.rows), triton.cdiv(num_blocks, config.blocks))](
        weight.words, weight.scale, weight.zero, weight.offset, out, weight.out_features, num_blocks,
        IN=weight.in_features, GROUP=weight.group, E2M1=weight.is_e2m1, HAS_ZERO=weight.zero is not None,
        HAS_OFFSET=weight.offset is not None, ROWS=config.rows, BLOCKS=config.blocks, PDL=pdl,
        **options(pdl, num_warps=config.num_warps),
    )  # fmt: skip
    return out
