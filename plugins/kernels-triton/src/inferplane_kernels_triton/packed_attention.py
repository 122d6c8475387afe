"""Attention over sequences that lie one after another, without a cache: in both directions, or causal.

A program handles a tile of consecutive queries of one sequence for one head. Tiles stand in one row as in
`prefill_attention`, so that nothing is prepared on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.attention_tile import LOG2_E, finish, weigh
from inferplane_kernels_triton.launch import begin, options, require_unit_stride
from inferplane_kernels_triton.prefill_attention import request_of_tile

LEAST_DIM = 16
"""Of a product's depth, which is a power of two."""


@dataclass(frozen=True)
class PackedConfig:
    """How the kernel is launched."""

    queries: int = 64
    keys: int = 64
    num_warps: int = 4
    num_stages: int = 2

    @classmethod
    def default(cls, dtype: torch.dtype, head_dim: int) -> PackedConfig:
        """float32 is multiplied without matrix units, so its tiles are smaller."""
        if dtype != torch.float32:
            return cls()
        return cls(queries=32 if head_dim <= 128 else 16, keys=32, num_stages=1)


def dim_parts(head_dim: int) -> tuple[int, int]:
    """Two powers of two that hold a head with the fewest numbers to spare; the second may be 0."""
    whole = max(LEAST_DIM, triton.next_power_of_2(head_dim))
    first = whole // 2
    second = max(LEAST_DIM, triton.next_power_of_2(max(1, head_dim - first)))
    return (first, second) if first >= LEAST_DIM and first + second < whole else (whole, 0)


@triton.jit(do_not_specialize=["num_sequences"])
def _packed_attention(
    q_ptr, k_ptr, v_ptr, out_ptr, query_starts_ptr, key_starts_ptr, q_token, q_head, k_token, k_head, v_token, v_head,
    out_token, out_head, scale, window, num_sequences,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, TAIL: tl.constexpr,
    VALUES: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES queries of one sequence, one head, whose numbers are DIM and, behind them, TAIL. Late tiles
    of causal attention have most keys, so they start first."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    if IS_CAUSAL:
        tile = tl.num_programs(1) - 1 - tile
    begin(PDL)
    sequence = request_of_tile(query_starts_ptr, tile, num_sequences, QUERIES)
    first_row = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - first_row
    first_query = (tile - (first_row // QUERIES + sequence)) * QUERIES
    if first_query < query_len:
        first_key = tl.load(key_starts_ptr + sequence)
        key_len = tl.load(key_starts_ptr + sequence + 1) - first_key
        columns = tl.arange(0, DIM)
        in_dim = columns < HEAD_DIM
        value_columns = tl.arange(0, VALUES)
        in_value = value_columns < VALUE_DIM
        queries = first_query + tl.arange(0, QUERIES)
        positions = key_len - query_len + queries
        exists_query = queries < query_len
        rows = (first_row + queries).to(tl.int64)
        q_rows = q_ptr + rows[:, None] * q_token + head * q_head
        q = tl.load(q_rows + columns[None, :], mask=exists_query[:, None] & in_dim[None, :], other=0.0)
        if TAIL > 0:
            tail = DIM + tl.arange(0, TAIL)
            in_tail = tail < HEAD_DIM
            q_tail = tl.load(q_rows + tail[None, :], mask=exists_query[:, None] & in_tail[None, :], other=0.0)
        first = 0
        last = key_len
        if IS_CAUSAL:
            last = tl.minimum(key_len, key_len - query_len + first_query + QUERIES)
        if HAS_WINDOW:
            first = tl.maximum(first_query - window, 0) // KEYS * KEYS
            last = tl.minimum(key_len, first_query + QUERIES + window)
        acc = tl.zeros((QUERIES, VALUES), dtype=tl.float32)
        largest = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((QUERIES,), dtype=tl.float32)
        offsets = tl.arange(0, KEYS)
        k_rows = k_ptr + (head // GROUP_SIZE) * k_head
        v_rows = v_ptr + (head // GROUP_SIZE) * v_head
        for start in tl.range(first, last, KEYS, num_stages=STAGES):
            keys = start + offsets
            exists = keys < last
            cells = (first_key + keys).to(tl.int64)[:, None]
            k = tl.load(
                k_rows + cells * k_token + columns[None, :], mask=exists[:, None] & in_dim[None, :], other=0.0
            )
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if TAIL > 0:
                k_tail = tl.load(
                    k_rows + cells * k_token + tail[None, :],
                    mask=exists[:, None] & in_tail[None, :],
                    other=0.0,
                )
                scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
            scores = scores * (scale * LOG2_E)
            visible = exists[None, :]
            apart = keys[None, :] - positions[:, None]
            if IS_CAUSAL:
                visible = visible & (apart <= 0)
            if HAS_WINDOW:
                visible = visible & (apart <= window) & (apart >= -window)
            weights, shrink, largest = weigh(tl.where(visible, scores, float("-inf")), largest)
            v = tl.load(
                v_rows + cells * v_token + value_columns[None, :],
                mask=exists[:, None] & in_value[None, :],
                other=0.0,
            )
            acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
            total = total * shrink + tl.sum(weights, axis=1)
        out = finish(acc, largest, total, total, False)
        out_rows = out_ptr + rows[:, None] * out_token + head * out_head + value_columns[None, :]
        tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=exists_query[:, None] & in_value[None, :])


def encoder_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    starts: torch.Tensor,
    scale: float,
    window: int | None,
    *,
    out: torch.Tensor | None = None,
    config: PackedConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Every token attends to its own sequence, or to those at most ``window`` away.

    ``q: [num_tokens, num_heads, head_dim]``, ``k, v: [num_tokens, num_kv_heads, head_dim]``, which may be views of one
    tensor; ``starts: [num_sequences + 1]`` int32, of which ``lengths`` are the differences. Returns ``out``, like q, by
    default a new tensor.
    """
    return _attend(q, k, v, lengths, starts, starts, scale, window, False, out, config, pdl)


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_lens: Sequence[int],
    query_starts: torch.Tensor,
    key_lens: Sequence[int],
    key_starts: torch.Tensor,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    config: PackedConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """The last tokens of each sequence attend to themselves and all before them.

    ``q: [num_queries, num_heads, head_dim]``, ``k: [num_keys, num_kv_heads, head_dim]``, ``v: [num_keys, num_kv_heads,
    value_dim]``; ``query_starts, key_starts: [num_sequences + 1]`` int32, of which ``query_lens`` and ``key_lens`` are
    the differences. Returns ``out: [num_queries, num_heads, value_dim]``, by default a new tensor.
    """
    if len(query_lens) != len(key_lens) or any(map(int.__gt__, query_lens, key_lens)):
        raise ValueError(f"sequences of {list(key_lens)} keys cannot have {list(query_lens)} queries")
    return _attend(q, k, v, query_lens, query_starts, key_starts, scale, None, True, out, config, pdl)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_lens: Sequence[int],
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    scale: float,
    window: int | None,
    is_causal: bool,
    out: torch.Tensor | None,
    config: PackedConfig | None,
    pdl: bool,
) -> torch.Tensor:
    require_unit_stride(q=q, k=k, v=v)
    num_queries, num_heads, head_dim = q.shape
    value_dim = v.shape[2]
    if k.shape[:2] != v.shape[:2] or k.shape[2] != head_dim or num_heads % k.shape[1]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit each other")
    config = config or PackedConfig.default(q.dtype, head_dim)
    if out is None:
        out = torch.empty((num_queries, num_heads, value_dim), dtype=q.dtype, device=q.device)
    dim, tail = dim_parts(head_dim)
    if num_queries:
        _packed_attention[(num_heads, num_queries // config.queries + len(query_lens))](
            q, k, v, out, query_starts, key_starts, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0),
            v.stride(1), out.stride(0), out.stride(1), scale, window or 0, len(query_lens),
            GROUP_SIZE=num_heads // k.shape[1], HEAD_DIM=head_dim, VALUE_DIM=value_dim, HAS_WINDOW=window is not None,
            IS_CAUSAL=is_causal, QUERIES=config.queries, KEYS=config.keys, DIM=dim, TAIL=tail,
            VALUES=max(LEAST_DIM, triton.next_power_of_2(value_dim)), STAGES=config.num_stages, PDL=pdl,
            **options(pdl, num_warps=config.num_warps, num_stages=config.num_stages),
        )  # fmt: skip
    return out
