"""A few rows times a weight of 4-bit codes.

As in `skinny_matmul` the weight is the left operand, and where it has too few rows its columns are split as well. A
step takes one block of 128 columns: its words stream through shared memory, each of their eight places becomes numbers
of x's type by putting the code into the mantissa of one, and the products of a group are scaled in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.activation import silu
from inferplane_kernels_triton.int4_matrix import Int4Matrix, codes_at, e2m1_at, load_scales
from inferplane_kernels_triton.launch import SECTOR_BYTES, begin, options, prefetch
from inferplane_kernels_triton.skinny_matmul import (
    MAX_TOKENS,
    MatmulWorkspace,
    collect_partials,
    leave_partial,
    padded_tokens,
)

_PROGRAMS = 256
"""Which occupy a large GPU."""


@dataclass(frozen=True)
class Int4MatmulConfig:
    """How the kernel is launched."""

    rows: int = 64
    """Rows of the weight in one program, of gate and up together where it is both."""
    splits: int = 1
    """Programs that share the blocks of one tile of rows."""
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 4
    """Lines of 128 bytes, of two blocks each, of every row that a program asks for while the kernel before it still
    runs: 0 or a power of two."""

    @classmethod
    def default(cls, num_tokens: int, out_features: int) -> Int4MatmulConfig:
        """With so many splits that there are programs enough; more tokens are read less often by larger tiles."""
        rows, num_warps = (64, 4) if num_tokens <= 16 else (128, 8)
        return cls(rows=rows, splits=min(8, max(1, _PROGRAMS * rows // out_features)), num_warps=num_warps)


@triton.jit
def _numbers(words, PLACE: tl.constexpr, NUMBER: tl.constexpr, E2M1: tl.constexpr):
    """The codes of one place, less 8 or as E2M1, in a type of half precision."""
    if E2M1:
        return e2m1_at(words, PLACE, NUMBER)
    code = codes_at(words, PLACE).to(tl.uint16)
    if NUMBER == tl.float16:  # noqa: SIM300 - the compiler compares types in this order
        return (code | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:
        return (code | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0


@triton.jit
def block_product(
    acc, words, x_ptr, x_mask, rows, row_mask, block, scale_ptr, zero_ptr, offset_ptr,
    IN: tl.constexpr, GROUP: tl.constexpr, E2M1: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Adds the product of one block, ``words: [ROWS, 16]``, to ``acc: [ROWS, TOKENS]``; x_ptr is ``[TOKENS, 1]``."""
    num_groups: tl.constexpr = (IN + GROUP - 1) // GROUP
    groups_of_block: tl.constexpr = 128 // GROUP if GROUP < 128 else 1
    places: tl.constexpr = 8 // groups_of_block
    number: tl.constexpr = x_ptr.dtype.element_ty
    lanes = tl.arange(0, 16)[None, :]
    for part in tl.static_range(groups_of_block):
        sums = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
        total = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
        for place in tl.static_range(part * places, (part + 1) * places):
            columns = block * 128 + place * 16 + lanes
            x = tl.trans(tl.load(x_ptr + columns, mask=x_mask & (columns < IN), other=0.0))
            sums = tl.dot(_numbers(words, place, number, E2M1), x, sums)
            if HAS_ZERO or HAS_OFFSET:
                total = tl.dot(tl.full((ROWS, 16), 1.0, number), x, total)
        group = (block * 128 + part * GROUP) // GROUP
        at = rows * num_groups + group
        mask = row_mask & (group < num_groups)
        if HAS_ZERO:
            sums -= total * tl.load(zero_ptr + at, mask=mask, other=0).to(tl.float32)[:, None]
        acc += sums * load_scales(scale_ptr, at, mask)[:, None]
        if HAS_OFFSET:
            acc += total * tl.load(offset_ptr + at, mask=mask, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _int4_matmul(
    x_ptr, words_ptr, scale_ptr, zero_ptr, offset_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr, x_row, out_row,
    num_tokens, num_out,
    IN: tl.constexpr, GROUP: tl.constexpr, E2M1: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of the weight (where GATED, a gate and an up by turns), one split, all tokens."""
    num_blocks: tl.constexpr = (IN + 127) // 128
    share: tl.constexpr = (num_blocks + SPLITS - 1) // SPLITS
    halves: tl.constexpr = 2 if GATED else 1
    tile = tl.program_id(0)
    first = tl.program_id(1) * share
    locals = tl.arange(0, ROWS)
    outs = tile * (ROWS // halves) + locals // halves
    row_mask = outs < num_out
    rows = (outs + locals % halves * num_out).to(tl.int64)
    tokens = tl.arange(0, TOKENS)
    x_mask = (tokens < num_tokens)[:, None]
    cells = rows[:, None] * (num_blocks * 16) + tl.arange(0, 16)[None, :]
    acc = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    if PDL and PREFETCH > 0:
        # The weight is no earlier kernel's work: memory need not stand still while the last of these comes to its end.
        ahead = first * 16 + tl.arange(0, PREFETCH * 128 // SECTOR_BYTES) * (SECTOR_BYTES // 4)
        starts = tl.where(row_mask, rows, 0)[:, None] * (num_blocks * 16)
        prefetch(words_ptr + starts + tl.minimum(ahead, num_blocks * 16 - 1)[None, :])
    begin(PDL)
    for block in tl.range(first, tl.minimum(num_blocks, first + share), num_stages=STAGES):
        words = tl.load(
            words_ptr + cells + block * 16, mask=row_mask[:, None], other=0, eviction_policy="evict_first"
        )
        acc = block_product(
            acc, words.to(tl.uint32, bitcast=True), x_ptr + tokens[:, None] * x_row, x_mask, rows, row_mask, block,
            scale_ptr, zero_ptr, offset_ptr, IN, GROUP, E2M1, HAS_ZERO, HAS_OFFSET, ROWS, TOKENS,
        )  # fmt: skip
    is_last = True
    if SPLITS > 1:
        size: tl.constexpr = ROWS * TOKENS
        split_size = tl.num_programs(0) * size
        mine = partial_ptr + tile * size
        leave_partial(acc, mine + tl.program_id(1) * split_size, ROWS, TOKENS)
        # All threads have written before one of them announces it; the counter orders the writes for who reads it.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(arrived_ptr + tile, 0)
            acc = collect_partials(mine, split_size, SPLITS, ROWS, TOKENS)
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        result = acc
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (ROWS // 2, 2, TOKENS)), (0, 2, 1)))
            result = silu(gate) * up
        made = tile * (ROWS // halves) + tl.arange(0, ROWS // halves)
        out_cells = tokens[None, :].to(tl.int64) * out_row + made[:, None]
        mask = (made < num_out)[:, None] & (tokens < num_tokens)[None, :]
        tl.store(out_ptr + out_cells, result.to(out_ptr.dtype.element_ty), mask=mask)


def int4_matmul(
    x: torch.Tensor,
    weight: Int4Matrix,
    *,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    workspace: MatmulWorkspace | None = None,
    config: Int4MatmulConfig = Int4MatmulConfig(),
    pdl: bool = False,
) -> torch.Tensor:
    """``x @ weight.T`` for up to 64 rows, summed in float32.

    ``x: [num_tokens, in_features]`` of half precision with contiguous rows, ``bias: [out_features]``. ``gated`` and
    ``workspace`` as in `skinny_matmul`. Returns ``out``: [num_tokens, out_features], by default a new tensor.
    """
    weight.check(x)
    num_tokens = len(x)
    if num_tokens > MAX_TOKENS:
        raise ValueError(f"x has {num_tokens} rows, needs at most {MAX_TOKENS}")
    num_out = weight.out_features // (2 if gated else 1)
    if out is None:
        out = torch.empty((num_tokens, num_out), dtype=x.dtype, device=x.device)
    if workspace is None and config.splits > 1:
        workspace = MatmulWorkspace.allocate(num_tokens, weight.out_features, config.splits, x.device)
    if num_tokens:
        _int4_matmul[(triton.cdiv(weight.out_features, config.rows), config.splits)](
            x, weight.words, weight.scale, weight.zero, weight.offset, bias, out,
            workspace.partial if workspace else None, workspace.arrived if workspace else None,
            x.stride(0), out.stride(0), num_tokens, num_out,
            IN=weight.in_features, GROUP=weight.group, E2M1=weight.is_e2m1, HAS_ZERO=weight.zero is not None,
            HAS_OFFSET=weight.offset is not None, HAS_BIAS=bias is not None, GATED=gated,
            TOKENS=padded_tokens(num_tokens), ROWS=config.rows, SPLITS=config.splits, STAGES=config.num_stages,
            PREFETCH=config.prefetch, PDL=pdl, **options(pdl, num_warps=config.num_warps),
        )  # fmt: skip
    return out
