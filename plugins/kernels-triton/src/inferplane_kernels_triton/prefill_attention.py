"""Paged attention with any number of queries a request, causal over what is stored before and with them.

A program handles a tile of consecutive queries of one request for all query heads of one KV head, so that each tile of
keys is read once for the whole group. Tiles of all requests stand in one row: request i starts at tile
``query_start[i] // QUERIES + i``, which leaves room for each request's last tile and lets a program find its request by
bisection, with nothing prepared on the host. The row begins with the first request's first tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.attention_tile import attend, check_cache, finish
from inferplane_kernels_triton.fp8_cache import KVScales, check_scales, is_by_token, token_strides
from inferplane_kernels_triton.launch import begin, options, require_unit_stride


@dataclass(frozen=True)
class PrefillConfig:
    """How the kernel is launched."""

    rows: int = 128
    """Queries times query heads of a KV head in one program."""
    keys: int = 64
    num_warps: int = 8
    num_stages: int = 2

    @classmethod
    def default(cls, dtype: torch.dtype) -> PrefillConfig:
        """float32 is multiplied without matrix units, so its tiles are smaller."""
        return cls(rows=32, keys=32, num_warps=4, num_stages=1) if dtype == torch.float32 else cls()


@triton.jit
def request_of_tile(query_start_ptr, tile, num_reqs, QUERIES: tl.constexpr):
    """The last request whose first tile is not behind ``tile``."""
    low = tl.full((), 0, tl.int32)
    high = num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_reqs", "table_row"])
def _prefill_attention(
    q_ptr, out_ptr, k_ptr, v_ptr, table_ptr, query_start_ptr, seq_lens_ptr, sinks_ptr, q_token, q_head,
    out_token, out_head, cache_block, cache_slot, cache_head, table_row, scale, k_scales_ptr, v_scales_ptr,
    scale_block, scale_slot, scale_head, soft_cap, window, num_reqs,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_TOKEN_SCALES: tl.constexpr, QUERIES: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr,
    DIM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES queries of one request, one KV head. Late tiles have most keys, so they start first."""
    kv_head = tl.program_id(0)
    begin(PDL)
    tile = tl.load(query_start_ptr) // QUERIES + tl.num_programs(1) - 1 - tl.program_id(1)
    request = request_of_tile(query_start_ptr, tile, num_reqs, QUERIES)
    query_begin = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_begin
    first_query = (tile - (query_begin // QUERIES + request)) * QUERIES
    if first_query < query_len:
        seq_len = tl.load(seq_lens_ptr + request)
        rows = tl.arange(0, QUERIES * GROUP)
        columns = tl.arange(0, DIM)
        queries = first_query + rows // GROUP
        heads = kv_head * GROUP_SIZE + rows % GROUP
        row_mask = (queries < query_len) & (rows % GROUP < GROUP_SIZE)
        mask = row_mask[:, None] & (columns < HEAD_DIM)[None, :]
        tokens = (query_begin + queries).to(tl.int64)
        q_rows = q_ptr + tokens[:, None] * q_token + heads[:, None] * q_head + columns[None, :]
        q = tl.load(q_rows, mask=mask, other=0.0)
        if HAS_SCALES:
            scale = scale * tl.load(k_scales_ptr + kv_head)
        positions = seq_len - query_len + queries
        first_position = seq_len - query_len + first_query
        last = tl.minimum(seq_len, first_position + QUERIES)
        # Up to the first query's position every key is visible to all rows.
        full = (first_position + 1) // KEYS * KEYS
        first = 0
        if HAS_WINDOW:
            first = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
            full = first
        acc = tl.zeros((QUERIES * GROUP, DIM), dtype=tl.float32)
        largest = tl.full((QUERIES * GROUP,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((QUERIES * GROUP,), dtype=tl.float32)
        table = table_ptr + request.to(tl.int64) * table_row
        k_head = k_ptr + kv_head * cache_head
        v_head = v_ptr + kv_head * cache_head
        k_scales = k_scales_ptr + kv_head * scale_head
        v_scales = v_scales_ptr + kv_head * scale_head
        if not HAS_WINDOW:
            acc, largest, total = attend(
                q, acc, largest, total, positions, table, k_head, v_head, cache_block, cache_slot, k_scales, v_scales,
                scale_block, scale_slot, first, full, scale, soft_cap, window, HEAD_DIM, BLOCK_SIZE, HAS_CAP,
                HAS_WINDOW, HAS_TOKEN_SCALES, False, KEYS, DIM, STAGES,
            )  # fmt: skip
        acc, largest, total = attend(
            q, acc, largest, total, positions, table, k_head, v_head, cache_block, cache_slot, k_scales, v_scales,
            scale_block, scale_slot, full, last, scale, soft_cap, window, HEAD_DIM, BLOCK_SIZE, HAS_CAP, HAS_WINDOW,
            HAS_TOKEN_SCALES, True, KEYS, DIM, STAGES,
        )  # fmt: skip
        sinks = tl.zeros((QUERIES * GROUP,), dtype=tl.float32)
        if HAS_SINKS:
            sinks = tl.load(sinks_ptr + heads, mask=row_mask, other=0.0).to(tl.float32)
        out = finish(acc, largest, total, sinks, HAS_SINKS)
        if HAS_SCALES:
            out = out * tl.load(v_scales_ptr + kv_head)
        out_rows = out_ptr + tokens[:, None] * out_token + heads[:, None] * out_head + columns[None, :]
        tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=mask)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: KVScales | None = None,
    out: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Causal attention of the last tokens of each request over its whole sequence.

    ``q: [num_tokens, num_heads, head_dim]``: request i owns the rows ``query_start[i]`` to ``query_start[i + 1]``, the
    last of its ``seq_lens[i]`` tokens, whose keys and values are stored already. ``query_start: [num_reqs + 1]`` and
    ``seq_lens: [num_reqs]`` int32. The rest as in `decode_attention`; requests with a single query are right here too,
    only slower. Returns ``out``, like q, by default a new tensor; rows before ``query_start[0]`` are of nobody here and
    are not written.
    """
    require_unit_stride(q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table)
    check_cache(q, k_cache, v_cache)
    check_scales(kv_scales, k_cache)
    k_scales, v_scales = kv_scales or (q, q)
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    num_reqs = len(seq_lens)
    config = config or PrefillConfig.default(q.dtype)
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    group_size = num_heads // num_kv_heads
    group = triton.next_power_of_2(group_size)
    queries = max(1, config.rows // group)
    if num_tokens:
        _prefill_attention[(num_kv_heads, num_tokens // queries + num_reqs)](
            q, out, k_cache, v_cache, block_table, query_start, seq_lens, q if sinks is None else sinks,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), k_cache.stride(0), k_cache.stride(1),
            k_cache.stride(2), block_table.stride(0), scale, k_scales, v_scales, *token_strides(kv_scales),
            soft_cap or 0.0, window or 0, num_reqs,
            GROUP_SIZE=group_size, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, HAS_CAP=soft_cap is not None,
            HAS_WINDOW=window is not None, HAS_SINKS=sinks is not None,
            HAS_SCALES=kv_scales is not None and not is_by_token(kv_scales), HAS_TOKEN_SCALES=is_by_token(kv_scales),
            QUERIES=queries, GROUP=group, KEYS=config.keys, DIM=triton.next_power_of_2(head_dim),
            STAGES=config.num_stages, PDL=pdl,
            **options(pdl, num_warps=config.num_warps, num_stages=config.num_stages),
        )  # fmt: skip
    return out
