"""One row times a weight of 4-bit codes in whole numbers, where a GPU adds up four products of bytes at once.

Each program rounds x to 16-bit fixed point, with a step for each 32 of its numbers: finer than the bfloat16 that x
comes in, but for numbers below a hundredth of the largest of these. Its upper and lower bytes are multiplied apart,
four columns an instruction. To make x ready costs more than a row, so that a program takes rows several times. As in
`int4_matvec`, residual, norm, bias and gate are fused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.int4_matrix import Int4Matrix
from inferplane_kernels_triton.int4_matvec import load_words, load_x, store_outputs
from inferplane_kernels_triton.launch import begin, compiles_for_nvidia, options
from inferplane_kernels_triton.matvec import NormBefore

LARGEST = tl.constexpr(32512.0)
"""Of fixed-point numbers whose upper byte, rounded, is one."""
ROUNDING = tl.constexpr(12582912.0)
"""Added to a float it leaves the whole number in the low bits."""
ONES = tl.constexpr(0x01010101)
CODES = tl.constexpr(0x0F0F0F0F)


@dataclass(frozen=True)
class Int4FixedMatvecConfig:
    """How the kernel is launched."""

    rows: int = 8
    """Rows of the weight that a program multiplies at a time (pairs of rows where the weight is gate and up)."""
    times: int = 2
    """How often, for an x that it makes ready once."""
    warps_for_32: int = 4
    """Warps of a program for each 32 blocks of 128 columns, all of which it has at once."""


@triton.jit
def _dot4(codes, x, acc, NATIVE: tl.constexpr):
    """``acc`` and the products of four unsigned bytes by four signed ones."""
    if NATIVE:
        asm: tl.constexpr = "dp4a.u32.s32 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(
            asm, "=r,r,r,r", [codes, x, acc], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            acc += ((codes >> (8 * byte)) & 255).to(tl.int32) * ((x << (24 - 8 * byte)) >> 24)
        return acc


@triton.jit
def _bytes(a, b, c, d):
    """The lowest byte of each, a's lowest."""
    return (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)


@triton.jit
def _from_byte(x, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """x with but COUNT of its bytes from FIRST on, the others zero."""
    if FIRST > 0:
        x = (x >> (8 * FIRST)) << (8 * FIRST)
    if FIRST + COUNT < 4:
        x = x & ((1 << (8 * (FIRST + COUNT))) - 1)
    return x


@triton.jit
def _largest(a, b, c, d):
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def _in_fixed_point(a, b, c, d, per_step):
    """Four tensors as the lower bytes and the upper bytes of their numbers in steps."""
    a = (a * per_step + ROUNDING).to(tl.int32, bitcast=True)
    b = (b * per_step + ROUNDING).to(tl.int32, bitcast=True)
    c = (c * per_step + ROUNDING).to(tl.int32, bitcast=True)
    d = (d * per_step + ROUNDING).to(tl.int32, bitcast=True)
    # lower bytes are signed, and what they lack of the number is the upper ones'
    return _bytes(a, b, c, d), _bytes((a + 128) >> 8, (b + 128) >> 8, (c + 128) >> 8, (d + 128) >> 8)


@triton.jit
def _add_half(
    sums,
    total,
    words,
    lower,
    upper,
    SHIFT: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Adds to ``sums: [rows, threads]`` the codes, less 8, of half the places times x; to ``total: [threads]`` x."""
    lower, upper = _from_byte(lower, FIRST, COUNT), _from_byte(upper, FIRST, COUNT)
    ones = tl.full(lower.shape, ONES, tl.int32)
    zeros = tl.zeros(lower.shape, tl.int32)
    x = _dot4(ones, lower, 256 * _dot4(ones, upper, zeros, NATIVE), NATIVE)
    codes = ((words >> SHIFT) & CODES).to(tl.int32, bitcast=True)
    least = tl.zeros(codes.shape, tl.int32) - 8 * x[None, :]
    by_lower = _dot4(codes, tl.broadcast_to(lower[None, :], codes.shape), least, NATIVE)
    by_upper = _dot4(
        codes, tl.broadcast_to(upper[None, :], codes.shape), tl.zeros(codes.shape, tl.int32), NATIVE
    )
    fours = tl.reshape(by_lower + 256 * by_upper, (codes.shape[0], codes.shape[1] // 4, 4))
    return sums + tl.sum(fours, axis=2), total + tl.sum(tl.reshape(x, (x.shape[0] // 4, 4)), axis=1)


@triton.jit
def _x_in_fixed_point(
    x_ptr, residual_ptr, residual_out_ptr, norm_ptr, eps, IN: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Lower and upper bytes ``[words]`` of x at the first four places and at the last, and ``[threads]`` of what a step
    stands for, the norm's factor included."""
    words = tl.arange(0, 16 * BLOCKS)
    starts = words // 16 * 128 + words % 16
    squares = tl.zeros((16 * BLOCKS,), dtype=tl.float32)
    numbers = ()
    for place in tl.static_range(8):
        columns = starts + place * 16
        inside = columns < IN
        writes = tl.program_id(0) == 0
        x = load_x(x_ptr, residual_ptr, residual_out_ptr, columns, inside, writes, HAS_RESIDUAL)
        if HAS_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        numbers += (x,)  # type: ignore[assignment]
    n = numbers
    largest = tl.maximum(_largest(n[0], n[1], n[2], n[3]), _largest(n[4], n[5], n[6], n[7]))  # type: ignore[misc]
    step = tl.maximum(tl.max(tl.reshape(largest, (4 * BLOCKS, 4)), axis=1), 1e-30) / LARGEST
    per_step = tl.reshape(tl.broadcast_to((1.0 / step)[:, None], (4 * BLOCKS, 4)), (16 * BLOCKS,))
    # fixed point has no word for what is not a number, and maxima pass over it: the step keeps it
    odd = (n[0] + n[1] + n[2] + n[3] + n[4] + n[5] + n[6] + n[7]) * 0.0  # type: ignore[misc]
    step += tl.sum(tl.reshape(odd, (4 * BLOCKS, 4)), axis=1)
    if HAS_NORM:
        step *= tl.rsqrt(tl.sum(squares, axis=0) / IN + eps)
    lower_first, upper_first = _in_fixed_point(n[0], n[1], n[2], n[3], per_step)  # type: ignore[misc]
    lower_last, upper_last = _in_fixed_point(n[4], n[5], n[6], n[7], per_step)  # type: ignore[misc]
    return lower_first, upper_first, lower_last, upper_last, step


@triton.jit
def _load_groups(ptr, at, is_row, group, num_groups, GROUP: tl.constexpr):
    """What each thread needs of scales or zero points, for the 128 / GROUP groups of a block or the one it is in."""
    groups_of_block: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    loaded = ()
    for part in tl.static_range(groups_of_block):
        mask = is_row[:, None] & (group + part < num_groups)[None, :]
        loaded += (tl.load(ptr + at + part, mask=mask, other=0),)  # type: ignore[assignment]
    return loaded


@triton.jit
def _int4_fixed_matvec(
    x_ptr, residual_ptr, residual_out_ptr, norm_ptr, words_ptr, scale_ptr, zero_ptr, offset_ptr, bias_ptr, out_ptr,
    num_out, eps,
    IN: tl.constexpr, GROUP: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, TIMES: tl.constexpr,
    BLOCKS: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program takes TIMES times ROWS rows of the weight: its outputs or, where GATED, gate and up by turns."""
    num_blocks: tl.constexpr = (IN + 127) // 128
    num_groups: tl.constexpr = (IN + GROUP - 1) // GROUP
    groups_of_block: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    places: tl.constexpr = 8 // groups_of_block
    halves: tl.constexpr = 2 if GATED else 1
    made: tl.constexpr = ROWS // halves
    locals = tl.arange(0, ROWS)
    outs = tl.program_id(0) * (made * TIMES) + locals // halves
    # A thread has four neighbouring words of a row: 32 columns, which share a step. Words lie in one dimension, so that
    # every compiler gives the neighbours to a warp.
    quarters = tl.arange(0, 4 * BLOCKS)
    cells = tl.arange(0, 16 * BLOCKS)
    is_word = (cells < num_blocks * 16)[None, :]
    # The weight is no earlier kernel's work: its first part is on its way while the kernel before this one finishes.
    # Scales come a part ahead as words do, or each part would wait for memory twice.
    first = tl.program_id(0).to(tl.int64) * (made * TIMES)
    words_ptr += first * (num_blocks * 16)
    local_rows = locals // halves + locals % halves * num_out
    cells = local_rows[:, None] * (num_blocks * 16) + cells[None, :]
    words = load_words(words_ptr, cells, is_word & (outs < num_out)[:, None])
    group = quarters // 4 * 128 // GROUP
    at = first * num_groups + (local_rows[:, None] * num_groups + group[None, :])
    scales = _load_groups(scale_ptr, at, outs < num_out, group, num_groups, GROUP)
    begin(PDL)
    lower_first, upper_first, lower_last, upper_last, step = _x_in_fixed_point(
        x_ptr, residual_ptr, residual_out_ptr, norm_ptr, eps, IN, BLOCKS, HAS_RESIDUAL, HAS_NORM
    )
    for time in range(TIMES):
        is_row = outs < num_out
        outs += made
        words_ptr += made * num_blocks * 16
        is_next = (outs < num_out) & (time + 1 < TIMES)
        next_words = load_words(words_ptr, cells, is_word & is_next[:, None])
        next_scales = _load_groups(scale_ptr, at + made * num_groups, is_next, group, num_groups, GROUP)
        if HAS_ZERO:
            zeros = _load_groups(zero_ptr, at, is_row, group, num_groups, GROUP)
        if HAS_OFFSET:
            offsets = _load_groups(offset_ptr, at, is_row, group, num_groups, GROUP)
        acc = tl.zeros((ROWS, 4 * BLOCKS), dtype=tl.float32)
        for part in tl.static_range(groups_of_block):
            sums = tl.zeros((ROWS, 4 * BLOCKS), dtype=tl.int32)
            total = tl.zeros((4 * BLOCKS,), dtype=tl.int32)
            # the places of a group: those of both halves, all of one, or some bytes of one
            if part * places < 4:
                sums, total = _add_half(
                    sums, total, words, lower_first, upper_first, 0, part * places % 4, places, NATIVE
                )
            if (part + 1) * places > 4:
                sums, total = _add_half(
                    sums, total, words, lower_last, upper_last, 4, part * places % 4, places, NATIVE
                )
            product, x_total = sums.to(tl.float32), total.to(tl.float32)[None, :]
            if HAS_ZERO:
                product -= x_total * zeros[part].to(tl.float32)
            acc += product * scales[part].to(tl.float32)
            if HAS_OFFSET:
                acc += x_total * offsets[part].to(tl.float32)
        words, scales = next_words, next_scales
        at += made * num_groups
        result = tl.sum(acc * step[None, :], axis=1)
        made_before = first + time * made
        rows = made_before + local_rows
        store_outputs(result, bias_ptr, out_ptr, rows, is_row, made_before, num_out, HAS_BIAS, GATED, ROWS)


def int4_fixed_matvec(
    x: torch.Tensor,
    weight: Int4Matrix,
    *,
    norm: NormBefore | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: Int4FixedMatvecConfig = Int4FixedMatvecConfig(),
    pdl: bool = False,
) -> torch.Tensor:
    """As `int4_matvec`, of whole numbers."""
    weight.check(x)
    if weight.is_e2m1:
        raise ValueError("weight: codes of E2M1 are no whole numbers; use int4_matvec")
    if len(x) != 1:
        raise ValueError(f"x has {len(x)} rows, needs 1")
    if norm is not None:
        norm.check(x)
    num_out = weight.out_features // (2 if gated else 1)
    if out is None:
        out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    blocks = max(8, triton.next_power_of_2(weight.words.shape[1] // 16))
    num_warps = min(16, max(1, blocks // 8 * config.warps_for_32 // 4))
    residual = norm.residual if norm else None
    _int4_fixed_matvec[(triton.cdiv(num_out, config.rows * config.times),)](
        x, x if residual is None else residual, norm.residual_out if norm else None, norm.weight if norm else None,
        weight.words, weight.scale, weight.zero, weight.offset, bias, out, num_out, norm.eps if norm else 0.0,
        IN=weight.in_features, GROUP=weight.group, HAS_RESIDUAL=residual is not None, HAS_NORM=norm is not None,
        HAS_ZERO=weight.zero is not None, HAS_OFFSET=weight.offset is not None, HAS_BIAS=bias is not None,
        GATED=gated, ROWS=config.rows * (2 if gated else 1), TIMES=config.times, BLOCKS=blocks,
        NATIVE=compiles_for_nvidia(_int4_fixed_matvec), PDL=pdl, **options(pdl, num_warps=num_warps),
    )  # fmt: skip
    return out
