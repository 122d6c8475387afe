"""What attention is, in float64 and one query at a time, with nothing of the engine in it."""

from __future__ import annotations

import torch

from inferplane.api.attention import AttentionLayer
from inferplane.api.kv import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)


def attend(
    layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The last ``len(q)`` tokens of one sequence over all of it.

    ``q: [num_queries, num_heads, head_dim]``, ``k: [seq_len, num_kv_heads, head_dim]``,
    ``v: [seq_len, num_kv_heads, value_dim]``. Returns ``[num_queries, num_heads, value_dim]`` in float64.
    """
    q, k, v = q.double(), k.double(), v.double()
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    group = layer.num_heads // layer.num_kv_heads
    for row in range(len(q)):
        position = len(k) - len(q) + row
        seen = slice(first_visible(layer.spec, position), position + 1)
        keys, values = (x[seen].repeat_interleave(group, 1) for x in (k, v))
        scores = (keys * q[row]).sum(-1) * layer.scale  # [num_seen, num_heads]
        if layer.soft_cap is not None:
            scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
        weights = scores.exp()
        total = weights.sum(0) if sinks is None else weights.sum(0) + sinks.double().exp()
        out[row] = ((weights / total).unsqueeze(-1) * values).sum(0)
    return out


def first_visible(spec: KVCacheSpec, position: int) -> int:
    """The earliest token that the one at ``position`` attends to."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position + 1 - spec.window)
    if isinstance(spec, ChunkedLocalSpec):
        return position - position % spec.chunk
    assert type(spec) in (FullAttentionSpec, MLAAttentionSpec), type(spec).__name__
    return 0
