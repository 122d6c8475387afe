"""Paged attention with one query a request: split over the sequence, all query heads of a KV head in one program.

The number of splits is fixed at launch; how long a split is follows from the sequence length that the program reads
from the device. One captured launch therefore serves any lengths. The last program of a request and KV head to finish
puts the splits together (a counter in device memory finds out which one is the last): there is no second launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.attention_tile import attend, check_cache, finish
from inferplane_kernels_triton.fp8_cache import KVScales, check_scales, is_by_token, token_strides
from inferplane_kernels_triton.launch import SECTOR_BYTES, begin, options, prefetch, require_unit_stride

MAX_SPLITS = 64
MAX_PROGRAMS_PER_PROCESSOR = 4


@dataclass(frozen=True)
class DecodeConfig:
    """How the kernel is launched."""

    keys: int = 64
    """Keys a program handles at a time."""
    num_warps: int = 4
    num_stages: int = 3
    least_keys: int = 32
    """Keys of a split at least: putting splits together takes time, too."""
    programs_per_processor: int = 1
    """As many as splits may make; up to `MAX_PROGRAMS_PER_PROCESSOR`."""
    prefetch: int = 0
    """Keys of a split that a program asks for while the kernel before it still runs; 0 or a power of two."""

    @classmethod
    def default(cls, dtype: torch.dtype) -> DecodeConfig:
        """float32 is multiplied without matrix units, so its tiles are smaller."""
        return cls(keys=32, num_stages=2) if dtype == torch.float32 else cls()


@dataclass(frozen=True)
class DecodeWorkspace:
    """Where splits leave their partial results; one serves all layers of a stream, one launch after another."""

    partial: torch.Tensor
    """[num_reqs * num_heads * num_splits, head_dim] float32."""
    sums: torch.Tensor
    """[num_reqs * num_heads * num_splits, 2] float32: the largest score, in base 2, and the sum of weights."""
    arrived: torch.Tensor
    """[num_reqs * num_kv_heads] int32: splits that are finished; zero between launches."""

    @classmethod
    def allocate(
        cls,
        num_reqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_splits: int,
        device: torch.device,
    ) -> DecodeWorkspace:
        rows = num_reqs * num_heads * num_splits
        return cls(
            partial=torch.empty((rows, head_dim), dtype=torch.float32, device=device),
            sums=torch.empty((rows, 2), dtype=torch.float32, device=device),
            arrived=torch.zeros(num_reqs * num_kv_heads, dtype=torch.int32, device=device),
        )


def choose_num_splits(num_reqs: int, num_kv_heads: int, max_seq_len: int, num_programs: int) -> int:
    """Splits that make at most so many programs, which fill the device: a power of two, none shorter than 32 keys."""
    wanted = num_programs // max(1, num_reqs * num_kv_heads)
    useful = triton.cdiv(max_seq_len, 32)
    splits = 1
    while splits * 2 <= min(wanted, useful, MAX_SPLITS):
        splits *= 2
    return splits


@triton.jit
def range_of_split(
    seq_len,
    window,
    split,
    num_splits,
    LEAST_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):
    """(first, last, used): the keys of one split, and how many splits have any. Tiles with anything visible are dealt
    out evenly, though no fewer than LEAST_TILES to a split."""
    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(seq_len - window, 0) // KEYS
    num_tiles = tl.cdiv(seq_len, KEYS) - first_tile
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), LEAST_TILES)
    first = (first_tile + split * tiles_per_split) * KEYS
    return first, tl.minimum(seq_len, first + tiles_per_split * KEYS), tl.cdiv(num_tiles, tiles_per_split)


@triton.jit
def combine(
    partial_ptr, sums_ptr, rows, row_mask, num_used,
    HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Adds up the used splits of ``rows``: returns (acc, largest, total) as if one program had seen all keys.

    The sums come first and together, so that the partial results, which are many more, wait for nothing but memory.
    """
    columns = tl.arange(0, DIM)
    splits = tl.arange(0, WIDTH)
    mask = row_mask[:, None] & (columns < HEAD_DIM)[None, :]
    # Around the first-level cache, which does not see what other processors wrote.
    sums = sums_ptr + (rows[:, None] * SPLITS + splits[None, :]) * 2
    is_used = row_mask[:, None] & (splits < num_used)[None, :]
    part_largest = tl.load(sums, mask=is_used, other=float("-inf"), cache_modifier=".cg")
    part_total = tl.load(sums + 1, mask=is_used, other=0.0, cache_modifier=".cg")
    largest = tl.max(part_largest, axis=1)
    shrink = tl.exp2(part_largest - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
    acc = tl.zeros((ROWS, DIM), dtype=tl.float32)
    for split in tl.range(0, num_used, loop_unroll_factor=UNROLL):
        part_ptr = partial_ptr + (rows * SPLITS + split)[:, None] * HEAD_DIM + columns[None, :]
        part = tl.load(part_ptr, mask=mask, other=0.0, cache_modifier=".cg")
        acc += part * tl.sum(tl.where((splits == split)[None, :], shrink, 0.0), axis=1)[:, None]
    return acc, largest, tl.sum(part_total * shrink, axis=1)


@triton.jit(do_not_specialize=["table_row"])
def _decode_attention(
    q_ptr, out_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, sinks_ptr, partial_ptr, sums_ptr, arrived_ptr,
    q_token, q_head, out_token, out_head, cache_block, cache_slot, cache_head, table_row, scale, k_scales_ptr,
    v_scales_ptr, scale_block, scale_slot, scale_head, soft_cap, window,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_TOKEN_SCALES: tl.constexpr,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr, LEAST_TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: one KV head of one request, one split of its keys."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    num_kv_heads = tl.num_programs(0)
    members = tl.arange(0, ROWS)
    columns = tl.arange(0, DIM)
    heads = kv_head * GROUP_SIZE + members
    row_mask = members < GROUP_SIZE
    mask = row_mask[:, None] & (columns < HEAD_DIM)[None, :]
    seq_len = tl.load(seq_lens_ptr + request)
    first, last, num_used = range_of_split(seq_len, window, split, SPLITS, LEAST_TILES, HAS_WINDOW, KEYS)
    k_ptr += kv_head * cache_head
    v_ptr += kv_head * cache_head
    table_ptr += request * table_row
    if PDL and PREFETCH > 0:
        # All but the step's own key and value have long been there. Beyond the split's keys it is its last one again.
        keys = tl.minimum(first + tl.arange(0, PREFETCH), last - 1)
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
        sector: tl.constexpr = SECTOR_BYTES * 8 // k_ptr.dtype.element_ty.primitive_bitwidth
        sectors = tl.minimum(tl.arange(0, (DIM + sector - 1) // sector) * sector, HEAD_DIM - 1)
        ahead = (blocks * cache_block + (keys % BLOCK_SIZE) * cache_slot)[:, None] + sectors[None, :]
        prefetch(k_ptr + ahead)
        prefetch(v_ptr + ahead)
    begin(PDL)
    q_rows = q_ptr + request * q_token + heads[:, None] * q_head + columns[None, :]
    q = tl.load(q_rows, mask=mask, other=0.0)
    if HAS_SCALES:
        scale = scale * tl.load(k_scales_ptr + kv_head)
    acc = tl.zeros((ROWS, DIM), dtype=tl.float32)
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    positions = tl.zeros((ROWS,), dtype=tl.int32) + seq_len - 1
    acc, largest, total = attend(
        q, acc, largest, total, positions, table_ptr, k_ptr, v_ptr, cache_block, cache_slot,
        k_scales_ptr + kv_head * scale_head, v_scales_ptr + kv_head * scale_head, scale_block, scale_slot, first, last,
        scale, soft_cap, window, HEAD_DIM, BLOCK_SIZE, HAS_CAP, HAS_WINDOW, HAS_TOKEN_SCALES, True, KEYS, DIM, STAGES,
    )  # fmt: skip
    is_last = (split == 0) & (num_used == 1)
    if SPLITS > 1:  # noqa: SIM102 - a constant, and values of the device
        if (num_used > 1) & (split < num_used):
            rows = request * num_kv_heads * GROUP_SIZE + heads
            where = rows * SPLITS + split
            tl.store(partial_ptr + where[:, None] * HEAD_DIM + columns[None, :], acc, mask=mask)
            tl.store(sums_ptr + where * 2, largest, mask=row_mask)
            tl.store(sums_ptr + where * 2 + 1, total, mask=row_mask)
            # All threads have written before one of them announces it; the counter orders the writes for who reads.
            tl.debug_barrier()
            arrived = arrived_ptr + request * num_kv_heads + kv_head
            is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == num_used - 1
            if is_last:
                tl.store(arrived, 0)
                acc, largest, total = combine(
                    partial_ptr, sums_ptr, rows, row_mask, num_used, HEAD_DIM, SPLITS, WIDTH, ROWS, DIM, 4
                )
    if is_last:
        sinks = tl.zeros((ROWS,), dtype=tl.float32)
        if HAS_SINKS:
            sinks = tl.load(sinks_ptr + heads, mask=row_mask, other=0.0).to(tl.float32)
        out = finish(acc, largest, total, sinks, HAS_SINKS)
        if HAS_SCALES:
            out = out * tl.load(v_scales_ptr + kv_head)
        out_rows = out_ptr + request * out_token + heads[:, None] * out_head + columns[None, :]
        tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=mask)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    num_splits: int = 1,
    workspace: DecodeWorkspace | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: KVScales | None = None,
    out: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Attention of the last token of each request over its whole sequence.

    ``q: [num_reqs, num_heads, head_dim]``, ``k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]`` of
    any strides with a contiguous last dimension (block size a power of two from 16; fp8 is converted to q's dtype),
    ``block_table: [num_reqs, ≥ blocks]`` int32, ``seq_lens: [num_reqs]`` int32 counting the query's own token.
    ``window``: the last so many tokens are visible, the query's own included. ``soft_cap``: scores become
    ``cap * tanh(score / cap)``. ``sinks: [num_heads]`` logits that join the softmax denominator. With ``kv_scales``
    what is cached stands for its head's or, in a cache of int8, its own scale times itself.

    With ``num_splits`` > 1 a workspace of at least this batch is needed; give one where launches are captured in a
    graph, or leave it out and one is allocated. Returns ``out``, like q, by default a new tensor.
    """
    require_unit_stride(q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table)
    check_cache(q, k_cache, v_cache)
    check_scales(kv_scales, k_cache)
    k_scales, v_scales = kv_scales or (q, q)
    num_reqs, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    config = config or DecodeConfig.default(q.dtype)
    if out is None:
        out = torch.empty((num_reqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if workspace is None:
        workspace = DecodeWorkspace.allocate(
            num_reqs if num_splits > 1 else 0, num_heads, num_kv_heads, head_dim, num_splits, q.device
        )
    group_size = num_heads // num_kv_heads
    if num_reqs:
        _decode_attention[(num_kv_heads, num_splits, num_reqs)](
            q, out, k_cache, v_cache, block_table, seq_lens, q if sinks is None else sinks,
            workspace.partial, workspace.sums, workspace.arrived, q.stride(0), q.stride(1), out.stride(0),
            out.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), block_table.stride(0),
            scale, k_scales, v_scales, *token_strides(kv_scales), soft_cap or 0.0, window or 0,
            GROUP_SIZE=group_size, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, HAS_CAP=soft_cap is not None,
            HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None,
            HAS_SCALES=kv_scales is not None and not is_by_token(kv_scales), HAS_TOKEN_SCALES=is_by_token(kv_scales),
            SPLITS=num_splits, WIDTH=triton.next_power_of_2(num_splits),
            LEAST_TILES=triton.cdiv(config.least_keys, config.keys),
            ROWS=max(16, triton.next_power_of_2(group_size)), KEYS=config.keys,
            DIM=triton.next_power_of_2(head_dim), STAGES=config.num_stages, PREFETCH=config.prefetch, PDL=pdl,
            **options(pdl, num_warps=config.num_warps, num_stages=config.num_stages),
        )  # fmt: skip
    return out
