"""Attention in both directions over sequences that lie one after another, without a cache.

A program handles a tile of consecutive queries of one sequence for one head. Tiles stand in one row as in
`prefill_attention`, so that nothing is prepared on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.attention_tile import LOG2_E, finish
from inferplane_kernels_triton.launch import begin, options, require_unit_stride
from inferplane_kernels_triton.prefill_attention import request_of_tile


@dataclass(frozen=True)
class EncoderConfig:
    """How the kernel is launched."""

    queries: int = 64
    keys: int = 64
    num_warps: int = 4
    num_stages: int = 2

    @classmethod
    def default(cls, dtype: torch.dtype) -> EncoderConfig:
        """float32 is multiplied without matrix units, so its tiles are smaller."""
        return cls(queries=32, keys=32, num_warps=4, num_stages=1) if dtype == torch.float32 else cls()


@triton.jit(do_not_specialize=["num_sequences"])
def _encoder_attention(
    q_ptr, k_ptr, v_ptr, out_ptr, starts_ptr, q_token, q_head, k_token, k_head, v_token, v_head, out_token,
    out_head, scale, window, num_sequences,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_WINDOW: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: QUERIES queries of one sequence, one head. Softmax is computed online in base 2, in float32."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    begin(PDL)
    sequence = request_of_tile(starts_ptr, tile, num_sequences, QUERIES)
    first_row = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - first_row
    first_query = (tile - (first_row // QUERIES + sequence)) * QUERIES
    if first_query < length:
        columns = tl.arange(0, DIM)
        in_dim = columns < HEAD_DIM
        queries = first_query + tl.arange(0, QUERIES)
        mask = (queries < length)[:, None] & in_dim[None, :]
        rows = (first_row + queries).to(tl.int64)
        q_rows = q_ptr + rows[:, None] * q_token + head * q_head + columns[None, :]
        q = tl.load(q_rows, mask=mask, other=0.0)
        first = 0
        last = length
        if HAS_WINDOW:
            first = tl.maximum(first_query - window, 0) // KEYS * KEYS
            last = tl.minimum(length, first_query + QUERIES + window)
        acc = tl.zeros((QUERIES, DIM), dtype=tl.float32)
        largest = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((QUERIES,), dtype=tl.float32)
        offsets = tl.arange(0, KEYS)
        k_rows = k_ptr + (head // GROUP_SIZE) * k_head
        v_rows = v_ptr + (head // GROUP_SIZE) * v_head
        for start in tl.range(first, last, KEYS, num_stages=STAGES):
            keys = start + offsets
            exists = keys < last
            cells = (first_row + keys).to(tl.int64)
            loaded = exists[:, None] & in_dim[None, :]
            k = tl.load(k_rows + cells[:, None] * k_token + columns[None, :], mask=loaded, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
            visible = exists[None, :]
            if HAS_WINDOW:
                apart = keys[None, :] - queries[:, None]
                visible = visible & (apart <= window) & (apart >= -window)
            scores = tl.where(visible, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, axis=1))
            # A row that has seen no key yet keeps -inf, and -inf - -inf is no number.
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(largest - base)
            v = tl.load(v_rows + cells[:, None] * v_token + columns[None, :], mask=loaded, other=0.0)
            acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
            total = total * shrink + tl.sum(weights, axis=1)
            largest = new_largest
        out = finish(acc, largest, total, total, False)
        out_rows = out_ptr + rows[:, None] * out_token + head * out_head + columns[None, :]
        tl.store(out_rows, out.to(out_ptr.dtype.element_ty), mask=mask)


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
    config: EncoderConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Every token attends to its own sequence, or to those at most ``window`` away.

    ``q: [num_tokens, num_heads, head_dim]``, ``k, v: [num_tokens, num_kv_heads, head_dim]``, which may be views of one
    tensor; ``starts: [num_sequences + 1]`` int32, of which ``lengths`` are the differences. Returns ``out``, like q, by
    default a new tensor.
    """
    require_unit_stride(q=q, k=k, v=v)
    num_tokens, num_heads, head_dim = q.shape
    if k.shape != v.shape or k.shape[::2] != q.shape[::2] or num_heads % k.shape[1]:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not fit each other")
    config = config or EncoderConfig.default(q.dtype)
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens:
        _encoder_attention[(num_heads, num_tokens // config.queries + len(lengths))](
            q, k, v, out, starts, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            out.stride(0), out.stride(1), scale, window or 0, len(lengths),
            GROUP_SIZE=num_heads // k.shape[1], HEAD_DIM=head_dim, HAS_WINDOW=window is not None,
            QUERIES=config.queries, KEYS=config.keys, DIM=max(16, triton.next_power_of_2(head_dim)),
            STAGES=config.num_stages, PDL=pdl,
            **options(pdl, num_warps=config.num_warps, num_stages=config.num_stages),
        )  # fmt: skip
    return out
