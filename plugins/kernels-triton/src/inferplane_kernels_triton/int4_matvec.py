"""One row times a weight of 4-bit codes: as fast as the codes can be read, so that each may cost few instructions.

The code of a whole number is put into the mantissa of a float between 1 and 2 as it stands in its word, which is turned
four times to bring two codes at a time to where they count; the multiplication does the rest, by an x that is scaled to
match. What the ones in front and the codes' zero add is the same for every row, and goes out of the sum of each word
before its scale. That of E2M1 goes where a float's sign and the ends of its exponent and mantissa meet, which is the
number itself, only tiny: half of what is missing comes with x, the other half with the scale, so that neither is too
large.

As in `matvec`, residual, norm, bias and gate are fused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.activation import silu
from inferplane_kernels_triton.int4_matrix import Int4Matrix, load_scales
from inferplane_kernels_triton.launch import begin, options
from inferplane_kernels_triton.matvec import NormBefore

_ONE = 0x3F800000
"""The bits of 1.0. As an argument it is in a register, and one instruction masks a code and sets them."""


@dataclass(frozen=True)
class Int4MatvecConfig:
    """How the kernel is launched."""

    rows: int = 8
    """Rows of the weight in one program (pairs of rows where the weight is gate and up)."""
    blocks: int = 32
    """Blocks of 128 columns that a program handles at a time."""
    num_warps: int = 4


@triton.jit
def load_words(ptr, cells, mask):
    """Each is read once."""
    return tl.load(ptr + cells, mask=mask, other=0, eviction_policy="evict_first").to(tl.uint32, bitcast=True)


@triton.jit
def _one_and_code(words, one, PLACE: tl.constexpr):
    """``1 + code / 16`` of the first four places and ``1 + code / 256`` of the others, as float32."""
    # the low half of a byte goes to the mantissa's four highest bits, a high half to the four below
    left: tl.constexpr = (19 - 8 * PLACE) % 32 if PLACE < 4 else (11 - 8 * (PLACE - 4)) % 32
    mask: tl.constexpr = 0x00780000 if PLACE < 4 else 0x00078000
    turned = (words << left) | (words >> (32 - left))
    return ((turned & mask) | one).to(tl.float32, bitcast=True)


HALF_OF_E2M1 = tl.constexpr(2.0**63)
"""Twice it multiplies a float whose exponent has E2M1's bias to the number that was meant."""


@triton.jit
def _tiny_e2m1(words, PLACE: tl.constexpr):
    """The numbers of one place as float32, divided by HALF_OF_E2M1 twice."""
    left: tl.constexpr = 28 - 8 * (PLACE % 4) - 4 * (PLACE // 4)
    # the sign is shifted back with the others, and so is on both sides of what is masked
    bits = ((words << left).to(tl.int32, bitcast=True) >> 6).to(tl.uint32, bitcast=True)
    return (bits & 0x81C00000).to(tl.float32, bitcast=True)


@triton.jit
def _add_scaled(
    acc, sums, total, at, mask, scale_ptr, zero_ptr, offset_ptr, E2M1: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """Adds a group's ``sums`` of codes times x, ``[rows, quarters]`` of a block, whose x alone sum up to ``total``."""
    if HAS_ZERO:
        sums -= total * tl.load(zero_ptr + at, mask=mask, other=0).to(tl.float32)
    if E2M1:
        sums *= HALF_OF_E2M1
    acc += sums * load_scales(scale_ptr, at, mask)
    if HAS_OFFSET:
        acc += total * tl.load(offset_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def load_x(x_ptr, residual_ptr, residual_out_ptr, columns, mask, writes, HAS_RESIDUAL: tl.constexpr):
    """float32 of x, or of its sum with the residual as it is rounded and, by one program, written."""
    x = tl.load(x_ptr + columns, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        if writes:
            tl.store(residual_out_ptr + columns, x, mask=mask)
    return x.to(tl.float32)


@triton.jit
def store_outputs(
    result, bias_ptr, out_ptr, rows, is_row, first, num_out,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes ``result: [ROWS]``, of the weight's ``rows``, to the outputs from ``first`` on: with the bias, and where
    GATED of a gate and an up by turns their product."""
    if HAS_BIAS:
        result += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(result, (ROWS // 2, 2)))
        result = silu(gate) * up
    outs = first + tl.arange(0, ROWS // 2 if GATED else ROWS)
    tl.store(out_ptr + outs, result.to(out_ptr.dtype.element_ty), mask=outs < num_out)


@triton.jit
def _int4_matvec(
    x_ptr, residual_ptr, residual_out_ptr, norm_ptr, words_ptr, scale_ptr, zero_ptr, offset_ptr, bias_ptr, out_ptr,
    num_out, eps, one,
    IN: tl.constexpr, GROUP: tl.constexpr, E2M1: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program takes ROWS rows of the weight: its outputs or, where GATED, a gate and an up by turns for each."""
    num_blocks: tl.constexpr = (IN + 127) // 128
    num_groups: tl.constexpr = (IN + GROUP - 1) // GROUP
    groups_of_block: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    places: tl.constexpr = 8 // groups_of_block
    halves: tl.constexpr = 2 if GATED else 1
    program = tl.program_id(0)
    locals = tl.arange(0, ROWS)
    outs = program * (ROWS // halves) + locals // halves
    is_row = outs < num_out
    rows = (outs + locals % halves * num_out).to(tl.int64)
    row_starts = rows[:, None] * (num_blocks * 16)
    # A thread has four neighbouring words of a row. Words lie in one dimension, so that every compiler gives the
    # neighbours to a warp.
    in_tile = tl.arange(0, 16 * BLOCKS)
    quarters = tl.arange(0, 4 * BLOCKS)
    cells = in_tile[None, :]
    # The weight is no earlier kernel's work: its first part is on its way while the kernel before this one finishes.
    mask = is_row[:, None] & (cells < num_blocks * 16)
    words = load_words(words_ptr + row_starts, cells, mask)
    begin(PDL)
    acc = tl.zeros((ROWS, 4 * BLOCKS), dtype=tl.float32)
    squares = tl.zeros((16 * BLOCKS,), dtype=tl.float32)
    for start in range(0, num_blocks, BLOCKS):
        cells += BLOCKS * 16
        mask = is_row[:, None] & (cells < num_blocks * 16)
        next_words = load_words(words_ptr + row_starts, cells, mask)
        for part in tl.static_range(groups_of_block):
            # x first: what the ones and the codes' zero add to a word's sum is then where the sum begins
            total = tl.zeros((16 * BLOCKS,), dtype=tl.float32)
            ones = tl.zeros((16 * BLOCKS,), dtype=tl.float32)
            factors = ()
            for place in tl.static_range(part * places, (part + 1) * places):
                columns = (start + in_tile // 16) * 128 + place * 16 + in_tile % 16
                inside = columns < IN
                x = load_x(x_ptr, residual_ptr, residual_out_ptr, columns, inside, program == 0, HAS_RESIDUAL)
                if HAS_NORM:
                    squares += x * x
                    x *= tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
                total += x
                if E2M1:
                    factors += (x * HALF_OF_E2M1,)  # type: ignore[assignment]
                else:
                    factor = 16.0 if place < 4 else 256.0
                    ones += (factor + 8.0) * x
                    factors += (factor * x,)  # type: ignore[assignment]
            sums = tl.zeros((ROWS, 16 * BLOCKS), dtype=tl.float32) - ones[None, :]
            for place in tl.static_range(places):
                if E2M1:
                    numbers = _tiny_e2m1(words, part * places + place)
                else:
                    numbers = _one_and_code(words, one, part * places + place)
                sums += numbers * factors[place][None, :]
            sums = tl.sum(tl.reshape(sums, (ROWS, 4 * BLOCKS, 4)), axis=2)
            total = tl.sum(tl.reshape(total, (4 * BLOCKS, 4)), axis=1)
            group = ((start + quarters // 4) * 128 + part * GROUP) // GROUP
            at = rows[:, None] * num_groups + group[None, :]
            is_group = is_row[:, None] & (group < num_groups)[None, :]
            acc = _add_scaled(
                acc, sums, total[None, :], at, is_group, scale_ptr, zero_ptr, offset_ptr, E2M1, HAS_ZERO, HAS_OFFSET
            )  # fmt: skip
        words = next_words
    result = tl.sum(acc, axis=1)
    if HAS_NORM:
        result *= tl.rsqrt(tl.sum(squares, axis=0) / IN + eps)
    first = program * (ROWS // halves)
    store_outputs(result, bias_ptr, out_ptr, rows, is_row, first, num_out, HAS_BIAS, GATED, ROWS)


def int4_matvec(
    x: torch.Tensor,
    weight: Int4Matrix,
    *,
    norm: NormBefore | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: Int4MatvecConfig = Int4MatvecConfig(),
    pdl: bool = False,
) -> torch.Tensor:
    """``x @ weight.T`` for a single row, summed in float32.

    ``x: [1, in_features]``, ``bias: [out_features]``. ``gated``: the first half of the weight is a gate, and the result
    is ``silu(gate) * up``, half as wide. Returns ``out``: [1, out_features], by default a new tensor in x's dtype.
    """
    weight.check(x)
    if len(x) != 1:
        raise ValueError(f"x has {len(x)} rows, needs 1")
    if norm is not None:
        norm.check(x)
    num_out = weight.out_features // (2 if gated else 1)
    if out is None:
        out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    blocks = min(config.blocks, triton.next_power_of_2(weight.words.shape[1] // 16))
    residual = norm.residual if norm else None
    _int4_matvec[(triton.cdiv(num_out, config.rows),)](
        x, x if residual is None else residual, norm.residual_out if norm else None, norm.weight if norm else None,
        weight.words, weight.scale, weight.zero, weight.offset, bias, out, num_out, norm.eps if norm else 0.0, _ONE,
        IN=weight.in_features, GROUP=weight.group, E2M1=weight.is_e2m1, HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None, HAS_ZERO=weight.zero is not None, HAS_OFFSET=weight.offset is not None,
        HAS_BIAS=bias is not None, GATED=gated, ROWS=config.rows * (2 if gated else 1), BLOCKS=blocks, PDL=pdl,
        **options(pdl, num_warps=config.num_warps),
    )  # fmt: skip
    return out
