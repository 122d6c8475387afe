"""Paged attention to latents (arXiv:2405.04434): one stored vector a token, which is key and value of every head.

A tile of stored vectors is read once: its first ``rank`` numbers are multiplied by the queries and, as values, by the
weights; the last ``rope_dim``, the rotated part of the key, by the queries alone. So heads of 512 + 64 numbers take two
products of 512 and 64, not of 1024, and a result has ``rank`` numbers.

Rows of a request are its tokens times its heads, which all see the same vectors; a program handles a tile of them, and
of long sequences one split of the keys, as in `decode_attention`. Tiles of all requests stand in one row: request i
starts at tile ``query_start[i] * num_heads // ROWS + i``. Nothing is prepared on the host, and a recorded launch holds
for any lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.attention_tile import LOG2_E, finish, weigh
from inferplane_kernels_triton.decode_attention import DecodeWorkspace, combine, range_of_split
from inferplane_kernels_triton.launch import begin, options, require_unit_stride

LEAST_ROWS = 16
"""Of a product on matrix units, and of its depth."""


@dataclass(frozen=True)
class LatentConfig:
    """How the kernel is launched. What is here by default fits the 64 KiB of shared memory that some devices have."""

    rows: int = 32
    """Tokens times heads of a program at most."""
    keys: int = 32
    num_warps: int = 8
    num_stages: int = 2
    least_keys: int = 64
    """Keys of a split at least."""
    programs_per_processor: int = 1
    """As many as splits may make."""

    @classmethod
    def default(cls, dtype: torch.dtype) -> LatentConfig:
        """float32 is multiplied without matrix units, so its tiles are smaller."""
        return cls(rows=16, keys=16, num_stages=1) if dtype == torch.float32 else cls()

    def rows_for(self, longest_query: int, num_heads: int) -> int:
        """Of a program, where no request has more tokens than that."""
        return min(self.rows, max(LEAST_ROWS, triton.next_power_of_2(longest_query * num_heads)))

    def num_tiles(self, query_lens: Sequence[int], num_heads: int) -> int:
        """Programs that have something to do, without splits."""
        rows = self.rows_for(max(query_lens), num_heads)
        return sum(triton.cdiv(length * num_heads, rows) for length in query_lens)

    def workspace(self, rank: int, num_programs: int, device: torch.device) -> DecodeWorkspace:
        """Where splits leave their partial results, for launches whose tiles times splits are at most so many."""
        # tiles stand in a row with gaps: at most one for each request
        return DecodeWorkspace.allocate(2 * num_programs, self.rows, 1, rank, 1, device)


@triton.jit
def _request_of_tile(query_start_ptr, tile, num_reqs, NUM_HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The last request whose first tile is not behind ``tile``."""
    low = tl.full((), 0, tl.int32)
    high = num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) * NUM_HEADS // ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(
    q, q_rope, acc, largest, total, positions, table_ptr, cache_ptr, cache_block, cache_slot, first, last, scale,
    RANK: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Goes over the keys ``first`` to ``last`` and returns (acc, largest, total) anew, as `attention_tile.attend` does.
    ``q: [rows, DIM]``, ``q_rope: [rows, ROPE]``, which is not looked at where ROPE is 0."""
    columns = tl.arange(0, DIM)
    offsets = tl.arange(0, KEYS)
    in_rank = columns < RANK
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        keys = start + offsets
        exists = keys < last
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        cells = cache_ptr + (blocks * cache_block + (keys % BLOCK_SIZE) * cache_slot)[:, None]
        latents = tl.load(cells + columns[None, :], mask=exists[:, None] & in_rank[None, :], other=0.0)
        latents = latents.to(q.dtype)
        scores = tl.dot(q, tl.trans(latents), input_precision="ieee")
        if ROPE > 0:
            rotated = tl.arange(0, ROPE)[None, :]
            k_rope = tl.load(cells + RANK + rotated, mask=exists[:, None] & (rotated < ROPE_DIM), other=0.0)
            scores = tl.dot(q_rope, tl.trans(k_rope.to(q.dtype)), scores, input_precision="ieee")
        visible = exists[None, :] & (keys[None, :] <= positions[:, None])
        scores = tl.where(visible, scores * (scale * LOG2_E), float("-inf"))
        weights, shrink, largest = weigh(scores, largest)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), latents, acc * shrink[:, None], input_precision="ieee")
    return acc, largest, total


@triton.jit(do_not_specialize=["num_reqs", "table_row"])
def _latent_attention(
    q_ptr, out_ptr, cache_ptr, table_ptr, query_start_ptr, seq_lens_ptr, cache_scale_ptr, partial_ptr, sums_ptr,
    arrived_ptr, q_token, q_head, out_token, out_head, cache_block, cache_slot, table_row, scale, num_reqs,
    NUM_HEADS: tl.constexpr, RANK: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, LEAST_TILES: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, ROPE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of one request, one split of their keys."""
    split = tl.program_id(1)
    begin(PDL)
    tile = tl.load(query_start_ptr) * NUM_HEADS // ROWS + tl.program_id(0)
    request = _request_of_tile(query_start_ptr, tile, num_reqs, NUM_HEADS, ROWS)
    query_begin = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_begin
    first_row = (tile - (query_begin * NUM_HEADS // ROWS + request)) * ROWS
    if first_row < query_len * NUM_HEADS:
        seq_len = tl.load(seq_lens_ptr + request)
        past = seq_len - query_len
        members = first_row + tl.arange(0, ROWS)
        row_mask = members < query_len * NUM_HEADS
        positions = past + members // NUM_HEADS
        columns = tl.arange(0, DIM)
        in_rank = columns < RANK
        mask = row_mask[:, None] & in_rank[None, :]
        tokens = (query_begin + members // NUM_HEADS).to(tl.int64)
        heads = members % NUM_HEADS
        q_rows = q_ptr + tokens[:, None] * q_token + heads[:, None] * q_head
        q = tl.load(q_rows + columns[None, :], mask=mask, other=0.0)
        q_rope = q
        if ROPE > 0:
            rotated = tl.arange(0, ROPE)[None, :]
            q_rope = tl.load(
                q_rows + RANK + rotated, mask=row_mask[:, None] & (rotated < ROPE_DIM), other=0.0
            )
        if HAS_SCALE:
            scale = scale * tl.load(cache_scale_ptr)
        end = tl.minimum(seq_len, past + (first_row + ROWS - 1) // NUM_HEADS + 1)
        first, last, num_used = range_of_split(end, 0, split, SPLITS, LEAST_TILES, False, KEYS)
        table_ptr += request.to(tl.int64) * table_row
        acc = tl.zeros((ROWS, DIM), dtype=tl.float32)
        largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        acc, largest, total = _attend(
            q, q_rope, acc, largest, total, positions, table_ptr, cache_ptr, cache_block, cache_slot, first, last,
            scale, RANK, ROPE_DIM, BLOCK_SIZE, KEYS, DIM, ROPE, STAGES,
        )  # fmt: skip
        is_last = (split == 0) & (num_used == 1)
        if SPLITS > 1:  # noqa: SIM102 - a constant, and values of the device
            if (num_used > 1) & (split < num_used):
                rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
                where = rows * SPLITS + split
                tl.store(partial_ptr + where[:, None] * RANK + columns[None, :], acc, mask=mask)
                tl.store(sums_ptr + where * 2, largest, mask=row_mask)
                tl.store(sums_ptr + where * 2 + 1, total, mask=row_mask)
                # All threads have written before one of them announces it; the counter orders the writes for who reads.
                tl.debug_barrier()
                arrived = arrived_ptr + tl.program_id(0)
                is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == num_used - 1
                if is_last:
                    tl.store(arrived, 0)
                    acc, largest, total = combine(
                        partial_ptr, sums_ptr, rows, row_mask, num_used, RANK, SPLITS, WIDTH, ROWS, DIM, 1
                    )
        if is_last:
            out = finish(acc, largest, total, total, False)
            if HAS_SCALE:
                out = out * tl.load(cache_scale_ptr)
            out_rows = out_ptr + tokens[:, None] * out_token + heads[:, None] * out_head + columns[None, :]
            tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=mask)


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    rank: int,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    longest_query: int,
    num_splits: int = 1,
    workspace: DecodeWorkspace | None = None,
    cache_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: LatentConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Causal attention of the last tokens of each request to the latents of its whole sequence.

    ``q: [num_tokens, num_heads, rank + rope_dim]``, absorbed: request i owns the rows ``query_start[i]`` to
    ``query_start[i + 1]``, the last of its ``seq_lens[i]`` tokens, which are stored already, and at most
    ``longest_query``. ``cache: [num_blocks, block_size, rank + rope_dim]``, the latent before the rotated part;
    ``block_table: [num_reqs, max_blocks]``, ``query_start: [num_reqs + 1]`` and ``seq_lens: [num_reqs]`` int32;
    ``cache_scale: [1]`` float32 is what 1 in a cache of fp8 stands for. With ``num_splits > 1`` sequences are cut into
    at most so many parts, and ``workspace`` (`LatentConfig.workspace`) must have room for all tiles times splits; by
    default it is allocated. Returns ``out: [num_tokens, num_heads, rank]``, by default a new tensor.
    """
    require_unit_stride(q=q, cache=cache, block_table=block_table)
    num_tokens, num_heads, head_dim = q.shape
    if head_dim != cache.shape[2] or not 0 < rank <= head_dim:
        raise ValueError(
            f"q of {head_dim} numbers and a cache of {cache.shape[2]} do not fit latents of {rank}"
        )
    config = config or LatentConfig.default(q.dtype)
    rows = config.rows_for(longest_query, num_heads)
    num_reqs, rope_dim = len(seq_lens), head_dim - rank
    num_tiles = num_tokens * num_heads // rows + num_reqs
    if num_splits > 1 and workspace is None:
        workspace = DecodeWorkspace.allocate(num_tiles, rows, 1, rank, num_splits, q.device)
    if num_splits > 1 and workspace is not None and len(workspace.partial) < num_tiles * rows * num_splits:
        raise ValueError(
            f"a workspace of {len(workspace.partial)} rows is too small for {num_tiles} tiles of {rows} rows in "
            f"{num_splits} splits"
        )
    if out is None:
        out = torch.empty((num_tokens, num_heads, rank), dtype=q.dtype, device=q.device)
    if num_tokens:
        partial = (q, q, q) if workspace is None else (workspace.partial, workspace.sums, workspace.arrived)
        _latent_attention[(num_tiles, num_splits)](
            q, out, cache, block_table, query_start, seq_lens, q if cache_scale is None else cache_scale, *partial,
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), cache.stride(0), cache.stride(1),
            block_table.stride(0), scale, num_reqs,
            NUM_HEADS=num_heads, RANK=rank, ROPE_DIM=rope_dim, BLOCK_SIZE=cache.shape[1],
            HAS_SCALE=cache_scale is not None, SPLITS=num_splits, WIDTH=triton.next_power_of_2(num_splits),
            LEAST_TILES=max(1, config.least_keys // config.keys), ROWS=rows, KEYS=config.keys,
            DIM=max(LEAST_ROWS, triton.next_power_of_2(rank)),
            ROPE=max(LEAST_ROWS, triton.next_power_of_2(rope_dim)) if rope_dim else 0, STAGES=config.num_stages,
            PDL=pdl,
            **options(pdl, num_warps=config.num_warps, num_stages=config.num_stages),
        )  # fmt: skip
    return out
