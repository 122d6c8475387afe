"""The op of prompts whose keys and values are there in full: causal attention without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.api.op import declare_op, random_tensor

_SCORES_AT_ONCE = 1 << 26
"""Of all heads; 256 MiB in float32, where torch's kernels keep them."""


def _causal_attention_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    query_lens, key_lens = [5, 1, 37], [5, 20, 70]
    q = random_tensor(g, dtype, sum(query_lens), 4, 24)
    k, v = (random_tensor(g, dtype, sum(key_lens), 2, dim) for dim in (24, 16))
    query_starts, key_starts = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (query_lens, key_lens))
    return q, k, v, query_lens, query_starts, key_lens, key_starts, 0.2


@declare_op(_causal_attention_inputs)
def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_lens: Sequence[int],
    query_starts: torch.Tensor,
    key_lens: Sequence[int],
    key_starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of the last tokens of each of some sequences to themselves and all tokens before them.

    ``q: [num_queries, num_heads, head_dim]``, ``k: [num_keys, num_kv_heads, head_dim]`` and ``v: [num_keys,
    num_kv_heads, value_dim]`` with num_heads a multiple of num_kv_heads; heads of q may lie apart. Sequences lie one
    after another: ``query_lens`` and ``key_lens`` say on the host how many queries and keys each has, at least one and
    no fewer keys than queries, and ``query_starts, key_starts: [num_sequences + 1]`` int32 on the device where they
    begin. ``scale`` is the factor on q·k. Returns a new tensor ``[num_queries, num_heads, value_dim]`` in q's dtype.
    """
    out = q.new_empty(*q.shape[:2], v.shape[2])
    first_query = first_key = 0
    for query_len, key_len in zip(query_lens, key_lens):
        keys = slice(first_key, first_key + key_len)
        rows_at_once = max(1, _SCORES_AT_ONCE // (q.shape[1] * key_len))
        for start in range(0, query_len, rows_at_once):
            end = min(query_len, start + rows_at_once)
            rows = slice(first_query + start, first_query + end)
            out[rows] = _attend(q[rows], k[keys], v[keys], key_len - query_len + start, scale)
        first_query += query_len
        first_key += key_len
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, scale: float) -> torch.Tensor:
    """The tokens of one sequence from ``position`` on."""
    end = position + len(q)
    is_visible = torch.ones(len(q), end, dtype=torch.bool, device=q.device).tril_(position)
    attended = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k[:end], v[:end])),
        attn_mask=is_visible,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return attended[0].transpose(0, 1)
