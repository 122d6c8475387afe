"""One row times a weight in fp8: as fast as its bytes can be read, so that each may cost about one instruction.

An instruction makes two codes half-precision numbers, and another multiplies them by two of x and adds. x is scaled so
that its largest number is 8: a few such products are far from the largest of half precision, and what they lose is less
than the result does when it is rounded. Sums of a few are widened, and added up in float32. To make x ready costs as
much as some rows, so that a program takes several. As in `matvec`, residual, norm, bias and gate are fused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.int4_matvec import store_outputs
from inferplane_kernels_triton.launch import begin, compiles_for_nvidia, options, require_unit_stride
from inferplane_kernels_triton.matvec import NormBefore

LARGEST = tl.constexpr(8.0)
"""Of x, scaled: 16 products by 448, the largest of e4m3, stay below 65,504."""
MOST_OF_WARP = 4096
"""Columns: with more a thread would add up more than 16 products."""
MAX_IN = 16384
"""Columns: a program has all of x at once, and sums of half precision grow with what a thread has of it."""


@dataclass(frozen=True)
class Fp8MatvecConfig:
    """How the kernel is launched."""

    rows: int = 4
    """Rows of the weight that a program multiplies at a time (pairs of rows where the weight is gate and up)."""
    times: int = 1
    """How often, for an x that it makes ready once."""
    num_warps: int = 4
    """Each of whose threads reads 16 codes of a row at once."""


@triton.jit
def _four(ptr, cells, mask):
    """float32 of four neighbouring bfloat16 at each of ``cells``, which count eight bytes."""
    fours = tl.load(ptr + cells, mask=mask, other=0)
    low, high = fours.to(tl.int32), (fours >> 32).to(tl.int32)
    return (
        (low << 16).to(tl.float32, bitcast=True),
        (low & -65536).to(tl.float32, bitcast=True),
        (high << 16).to(tl.float32, bitcast=True),
        (high & -65536).to(tl.float32, bitcast=True),
    )


@triton.jit
def _pair(a, b):
    """Two numbers of 16 bits in a word, ``a`` below."""
    low = a.to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return low | (b.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _add_products(acc, codes, low, high, NATIVE: tl.constexpr):
    """``acc`` and the products of four codes by four numbers of half precision, in two words.

    NATIVE: ``acc`` is two sums of half precision in a word; else it is their sum, in float32.
    """
    if NATIVE:
        asm: tl.constexpr = """{
            .reg .b16 first, last;
            .reg .b32 a, b;
            mov.b32 {first, last}, $1;
            cvt.rn.f16x2.e4m3x2 a, first;
            cvt.rn.f16x2.e4m3x2 b, last;
            fma.rn.f16x2 a, a, $2, $4;
            fma.rn.f16x2 $0, b, $3, a;
        }"""
        return tl.inline_asm_elementwise(
            asm, "=r,r,r,r,r", [codes, low, high, acc], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for place in tl.static_range(4):
            code = ((codes >> (8 * place)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
            half = (low if place < 2 else high) >> (16 * (place % 2))
            acc += code.to(tl.float32) * half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return acc


@triton.jit
def _widened(acc, NATIVE: tl.constexpr):
    if NATIVE:
        asm: tl.constexpr = """{
            .reg .b16 first, last;
            .reg .f32 a, b;
            mov.b32 {first, last}, $1;
            cvt.f32.f16 a, first;
            cvt.f32.f16 b, last;
            add.f32 $0, a, b;
        }"""
        return tl.inline_asm_elementwise(asm, "=f,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return acc


@triton.jit
def _x_in_half(
    x_ptr, residual_ptr, residual_out_ptr, norm_ptr, eps, IN: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """(two words of half precision for each four numbers, in 2 * PARTS tensors ``[WORDS]``; what a unit of them is)."""
    numbers = ()
    squares = tl.zeros((WORDS,), dtype=tl.float32)
    largest = tl.zeros((WORDS,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        cells = part * WORDS + tl.arange(0, WORDS)
        mask = cells < IN // 4
        x = _four(x_ptr, cells, mask)
        if HAS_RESIDUAL:
            added = _four(residual_ptr, cells, mask)
            a = (x[0] + added[0]).to(tl.bfloat16)
            b = (x[1] + added[1]).to(tl.bfloat16)
            c = (x[2] + added[2]).to(tl.bfloat16)
            d = (x[3] + added[3]).to(tl.bfloat16)
            if tl.program_id(0) == 0:
                low = _pair(a, b).to(tl.int64) & 0xFFFFFFFF
                tl.store(residual_out_ptr + cells, low | (_pair(c, d).to(tl.int64) << 32), mask=mask)
            x = (a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32))
        if HAS_NORM:
            squares += x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]
            by = _four(norm_ptr, cells, mask)
            x = (x[0] * by[0], x[1] * by[1], x[2] * by[2], x[3] * by[3])
        largest = tl.maximum(largest, tl.maximum(tl.abs(x[0]), tl.abs(x[1])))
        largest = tl.maximum(largest, tl.maximum(tl.abs(x[2]), tl.abs(x[3])))
        numbers += (x,)  # type: ignore[assignment]
    unit = tl.maximum(tl.max(largest, axis=0), 1e-30) / LARGEST
    per_unit = 1.0 / unit
    words = ()
    for part in tl.static_range(PARTS):
        a, b, c, d = numbers[part]
        a, b = (a * per_unit).to(tl.float16), (b * per_unit).to(tl.float16)
        c, d = (c * per_unit).to(tl.float16), (d * per_unit).to(tl.float16)
        words += (_pair(a, b), _pair(c, d))  # type: ignore[assignment]
    if HAS_NORM:
        unit *= tl.rsqrt(tl.sum(squares, axis=0) / IN + eps)
    return words, unit


@triton.jit
def _load_codes(ptr, starts, is_row, IN: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr):
    """Four in a word, of rows from ``starts`` on, each once, in PARTS tensors ``[rows, WORDS]``."""
    codes = ()
    for part in tl.static_range(PARTS):
        cells = part * WORDS + tl.arange(0, WORDS)
        mask = is_row[:, None] & (cells < IN // 4)[None, :]
        codes += (  # type: ignore[assignment]
            tl.load(
                ptr + starts[:, None] + cells[None, :], mask=mask, other=0, eviction_policy="evict_first"
            ),
        )
    return codes


@triton.jit
def _fp8_matvec(
    x_ptr, residual_ptr, residual_out_ptr, norm_ptr, codes_ptr, scale_ptr, bias_ptr, out_ptr, weight_row, num_out, eps,
    IN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, ROWS: tl.constexpr, TIMES: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr,
    NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program takes TIMES times ROWS rows of the weight: its outputs or, where GATED, gate and up by turns."""
    halves: tl.constexpr = 2 if GATED else 1
    made: tl.constexpr = ROWS // halves
    locals = tl.arange(0, ROWS)
    first = tl.program_id(0) * (made * TIMES)
    local_rows = locals // halves + locals % halves * num_out
    starts = (first + local_rows).to(tl.int64) * weight_row
    # The weight is no earlier kernel's work: its first part is on its way while the kernel before this one finishes.
    codes = _load_codes(codes_ptr, starts, first + locals // halves < num_out, IN, WORDS, PARTS)
    begin(PDL)
    x, unit = _x_in_half(
        x_ptr, residual_ptr, residual_out_ptr, norm_ptr, eps, IN, WORDS, PARTS, HAS_RESIDUAL, HAS_NORM
    )
    for time in tl.static_range(TIMES):
        is_row = first + time * made + locals // halves < num_out
        now = codes
        if time + 1 < TIMES:
            is_next = first + (time + 1) * made + locals // halves < num_out
            codes = _load_codes(codes_ptr + (time + 1) * made * weight_row, starts, is_next, IN, WORDS, PARTS)
        acc = tl.zeros((ROWS, WORDS), dtype=tl.int32 if NATIVE else tl.float32)
        for part in tl.static_range(PARTS):
            low = tl.broadcast_to(x[2 * part][None, :], (ROWS, WORDS))
            high = tl.broadcast_to(x[2 * part + 1][None, :], (ROWS, WORDS))
            acc = _add_products(acc, now[part], low, high, NATIVE)
        rows = first + time * made + local_rows
        scale = tl.load(scale_ptr + rows, mask=is_row, other=0.0)
        result = tl.sum(_widened(acc, NATIVE), axis=1) * (scale * unit)
        store_outputs(
            result, bias_ptr, out_ptr, rows, is_row, first + time * made, num_out, HAS_BIAS, GATED, ROWS
        )


def fp8_matvec(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm: NormBefore | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: Fp8MatvecConfig = Fp8MatvecConfig(),
    pdl: bool = False,
) -> torch.Tensor:
    """``x @ (weight * scale).T`` for a single row.

    ``x: [1, in_features]`` bfloat16, ``weight: [out_features, in_features]`` float8_e4m3fn with contiguous rows,
    in_features a multiple of 16 and at most `MAX_IN`, ``scale: [out_features]`` float32, ``bias: [out_features]``.
    ``gated``: the first half of the weight is a gate, and the result is ``silu(gate) * up``, half as wide.
    Returns ``out``: [1, out_features], by default a new tensor in x's dtype.
    """
    require_unit_stride(x=x, weight=weight)
    num_out, in_features = weight.shape
    if x.shape != (1, in_features) or x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype} of shape {tuple(x.shape)}, needs bfloat16 of (1, {in_features})")
    if in_features % 16 or weight.stride(0) % 16 or in_features > MAX_IN:
        raise ValueError(f"weight has {in_features} columns, needs a multiple of 16 up to {MAX_IN}")
    if norm is not None:
        norm.check(x)
    if gated:
        num_out //= 2
    if out is None:
        out = torch.empty((1, num_out), dtype=x.dtype, device=x.device)
    num_warps = max(config.num_warps, triton.next_power_of_2(triton.cdiv(in_features, MOST_OF_WARP)))
    words = 128 * num_warps
    residual, residual_out = (norm.residual, norm.residual_out) if norm else (None, None)
    fours = [
        None if each is None else each.view(torch.int64)
        for each in (x, residual, residual_out, norm.weight if norm else None)
    ]
    _fp8_matvec[(triton.cdiv(num_out, config.rows * config.times),)](
        *fours, weight.view(torch.int32), scale, bias, out, weight.stride(0) // 4, num_out, norm.eps if norm else 0.0,
        IN=in_features, HAS_RESIDUAL=residual is not None, HAS_NORM=norm is not None, HAS_BIAS=bias is not None,
        GATED=gated, ROWS=config.rows * (2 if gated else 1), TIMES=config.times, WORDS=words,
        PARTS=triton.cdiv(in_features, 4 * words), NATIVE=compiles_for_nvidia(_fp8_matvec), PDL=pdl,
        **options(pdl, num_warps=num_warps),
    )  # fmt: skip
    return out
