"""A few rows times a weight: the linear layers of small batches, which are bound by reading the weight.

The weight is the left operand, so that its many rows fill the height of the matrix unit and the few tokens its width.
Tiles of the weight stream through shared memory several stages ahead. Where the weight has too few rows to occupy every
processor, its columns are split as well; the last program of a tile to finish adds up the splits, always in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.activation import silu
from inferplane_kernels_triton.block_scale import (
    BlockScale,
    WeightScale,
    add_dot,
    columns_of_tile,
    row_scales,
    scale_arguments,
)
from inferplane_kernels_triton.launch import SECTOR_BYTES, begin, options, prefetch, require_unit_stride
from inferplane_kernels_triton.quantize import X_GROUP, group_stride

MAX_TOKENS = 64


@dataclass(frozen=True)
class MatmulConfig:
    """How the kernel is launched."""

    rows: int = 64
    """Rows of the weight in one program (pairs of rows where the weight is gate and up)."""
    columns: int = 128
    """Columns that a program handles at a time."""
    splits: int = 1
    """Programs that share the columns of one tile of rows."""
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 0
    """Columns of the weight, in times of ``columns``, that a program asks for while the kernel before it still runs: 0
    or a power of two."""


@dataclass(frozen=True)
class MatmulWorkspace:
    """Where splits leave their partial sums; one serves all layers of a stream, one launch after another."""

    partial: torch.Tensor
    """float32, flat."""
    arrived: torch.Tensor
    """int32, one for each tile of rows: splits that are finished; zero between launches."""

    @classmethod
    def allocate(
        cls, num_tokens: int, out_features: int, splits: int, device: torch.device
    ) -> MatmulWorkspace:
        """Enough for up to ``num_tokens`` and ``out_features`` (both halves of a gated weight), rounded up to tiles."""
        rows = triton.cdiv(out_features, 512) * 512
        size = splits * rows * padded_tokens(num_tokens)
        return cls(
            partial=torch.empty(size, dtype=torch.float32, device=device),
            arrived=torch.zeros(rows // 16, dtype=torch.int32, device=device),
        )


def padded_tokens(num_tokens: int) -> int:
    """The width of a product: the matrix unit's least, or a power of two above."""
    return max(16, triton.next_power_of_2(num_tokens))


@triton.jit
def leave_partial(acc, partial_ptr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Writes one split's sums ``[ROWS, TOKENS]``."""
    cells = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    tl.store(partial_ptr + cells, acc)


@triton.jit
def collect_partials(partial_ptr, split_size, SPLITS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """Adds up what all splits have left, around the first-level cache, which does not see other processors' writes."""
    cells = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    acc = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for split in range(SPLITS):
        acc += tl.load(partial_ptr + split * split_size + cells, cache_modifier=".cg")
    return acc


@triton.jit
def finish(acc, x_scale, scales, bias_ptr, rows, row_mask, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Whole sums ``[ROWS, TOKENS]`` of the weight's rows ``rows``, times the scales of tokens and rows, plus bias."""
    acc *= x_scale
    if HAS_SCALE:
        acc *= tl.load(scales, mask=row_mask, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_tokens", "x_scale_group"])
def _skinny_matmul(
    x_ptr, x_scale_ptr, weight_ptr, up_ptr, scale_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr,
    x_row, x_scale_group, weight_row, out_row, num_tokens, num_out,
    IN: tl.constexpr, HAS_X_SCALE: tl.constexpr, HAS_SCALE: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of the weight, one split of its columns, all tokens."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    share: tl.constexpr = (IN + SPLITS * COLUMNS - 1) // (SPLITS * COLUMNS) * COLUMNS
    first = split * share
    rows = tile * ROWS + tl.arange(0, ROWS)
    tokens = tl.arange(0, TOKENS)
    in_range = rows < num_out
    row_mask = in_range[:, None]
    scales = scale_ptr
    up_scales = scale_ptr
    if HAS_SCALE:
        scales += row_scales(0, rows, IN, SCALE_ROWS, SCALE_COLUMNS)
        up_scales += row_scales(0, num_out + rows, IN, SCALE_ROWS, SCALE_COLUMNS)
    row_starts = rows.to(tl.int64)[:, None] * weight_row
    token_starts = tokens[:, None] * x_row
    acc = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    up_acc = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    if PDL and PREFETCH > 0:
        # The weight is no earlier kernel's work: memory need not stand still while the last of these comes to its end.
        sector: tl.constexpr = SECTOR_BYTES * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
        sectors = first + tl.arange(0, PREFETCH * COLUMNS // sector) * sector
        ahead = (
            tl.minimum(rows, num_out - 1).to(tl.int64)[:, None] * weight_row
            + tl.minimum(sectors, IN - 1)[None, :]
        )
        prefetch(weight_ptr + ahead)
        if GATED:
            prefetch(up_ptr + ahead)
    begin(PDL)
    for start in tl.range(first, tl.minimum(IN, first + share), COLUMNS, num_stages=STAGES):
        columns = (start + tl.arange(0, COLUMNS))[None, :]
        mask = row_mask & (columns < IN)
        cells = row_starts + columns
        x_mask = (tokens < num_tokens)[:, None] & (columns < IN)
        x_scale = 1.0
        if HAS_X_SCALE and SCALE_COLUMNS > 0:
            places = start // X_GROUP * x_scale_group + tokens
            x_scale = tl.load(x_scale_ptr + places, mask=tokens < num_tokens, other=0.0)[None, :]
        x = tl.trans(tl.load(x_ptr + token_starts + columns, mask=x_mask, other=0.0))
        weight = tl.load(weight_ptr + cells, mask=mask, other=0.0, eviction_policy="evict_first")
        acc = add_dot(acc, weight, x, scales, x_scale, in_range, start, SCALE_COLUMNS)
        if GATED:
            up = tl.load(up_ptr + cells, mask=mask, other=0.0, eviction_policy="evict_first")
            up_acc = add_dot(up_acc, up, x, up_scales, x_scale, in_range, start, SCALE_COLUMNS)
    is_last = True
    if SPLITS > 1:
        size: tl.constexpr = ROWS * TOKENS
        kinds: tl.constexpr = 2 if GATED else 1
        split_size = tl.num_programs(0) * kinds * size
        mine = partial_ptr + tile * kinds * size
        leave_partial(acc, mine + split * split_size, ROWS, TOKENS)
        if GATED:
            leave_partial(up_acc, mine + size + split * split_size, ROWS, TOKENS)
        # All threads have written before one of them announces it; the counter orders the writes for who reads it.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(arrived_ptr + tile, 0)
            acc = collect_partials(mine, split_size, SPLITS, ROWS, TOKENS)
            if GATED:
                up_acc = collect_partials(mine + size, split_size, SPLITS, ROWS, TOKENS)
    if is_last:
        x_scale = 1.0
        if HAS_X_SCALE and SCALE_COLUMNS == 0:
            x_scale = tl.load(x_scale_ptr + tokens, mask=tokens < num_tokens, other=0.0)[None, :]
        by_row: tl.constexpr = HAS_SCALE and SCALE_COLUMNS == 0
        acc = finish(acc, x_scale, scales, bias_ptr, rows, in_range, by_row, HAS_BIAS)
        if GATED:
            up_acc = finish(up_acc, x_scale, up_scales, bias_ptr, num_out + rows, in_range, by_row, HAS_BIAS)
            acc = silu(acc) * up_acc
        out_cells = tokens[None, :].to(tl.int64) * out_row + rows[:, None]
        out_mask = row_mask & (tokens < num_tokens)[None, :]
        tl.store(out_ptr + out_cells, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


def skinny_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    weight_scale: WeightScale = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    workspace: MatmulWorkspace | None = None,
    config: MatmulConfig = MatmulConfig(),
    pdl: bool = False,
) -> torch.Tensor:
    """``x @ weight.T`` for up to 64 rows, summed in float32.

    ``x: [num_tokens, in_features]``, ``weight: [out_features, in_features]`` of any floating dtype (converted to x's),
    both with contiguous rows, ``weight_scale: [out_features]`` float32 where the weight is quantized per channel, or a
    `BlockScale`, ``x_scale: [num_tokens, 1]`` float32 where x is quantized per token (two of fp8 are multiplied as they
    are), beside a `BlockScale` by group as of `quantize_per_token`, ``bias: [out_features]``. ``gated``: the first half
    of the weight is a gate, and the result is ``silu(gate) * up``, half as wide. With splits a workspace is needed;
    give one where launches are captured in a graph, or leave it out and one is allocated. Returns ``out``: [num_tokens,
    out_features], by default a new tensor of ``out_dtype`` or x's.
    """
    require_unit_stride(x=x, weight=weight)
    num_tokens, in_features = x.shape
    num_out = len(weight) // (2 if gated else 1)
    if num_tokens > MAX_TOKENS or weight.shape[1] != in_features:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, needs at most {MAX_TOKENS} rows of {weight.shape[1]} columns"
        )
    if out is None:
        out = torch.empty((num_tokens, num_out), dtype=out_dtype or x.dtype, device=x.device)
    if workspace is None and config.splits > 1:
        workspace = MatmulWorkspace.allocate(num_tokens, len(weight), config.splits, x.device)
    scale, scale_constants = scale_arguments(weight_scale, weight)
    columns, x_scale_group = columns_of_tile(config.columns, scale_constants["SCALE_COLUMNS"]), 0
    if x_scale is not None and isinstance(weight_scale, BlockScale):
        columns, x_scale_group = columns_of_tile(columns, X_GROUP.value), group_stride(x, x_scale)
    if num_tokens:
        _skinny_matmul[(triton.cdiv(num_out, config.rows), config.splits)](
            x, x_scale, weight, weight[num_out:] if gated else weight, scale, bias, out,
            workspace.partial if workspace else None, workspace.arrived if workspace else None,
            x.stride(0), x_scale_group, weight.stride(0), out.stride(0), num_tokens, num_out,
            IN=in_features, HAS_X_SCALE=x_scale is not None, **scale_constants, HAS_BIAS=bias is not None, GATED=gated,
            TOKENS=padded_tokens(num_tokens), ROWS=config.rows, COLUMNS=columns, SPLITS=config.splits,
            STAGES=config.num_stages, PREFETCH=config.prefetch, PDL=pdl, **options(pdl, num_warps=config.num_warps),
        )  # fmt: skip
    return out
