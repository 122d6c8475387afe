"""Attention over a paged KV cache with torch's own products, in three ways for three kinds of request.

*Decoding* reads keys and values where they lie, with two products that take row numbers: scores are sampled from
``q @ all_keys.T`` at each request's rows, and outputs are weighted bags of value rows. Gathering first and multiplying
then, which is what the half precisions still do for keys, moves each byte three times instead of once: for 64 requests
of 160 tokens (9 query heads, 3 KV heads of 64, float32, cold) 4.2 ms on 2 cores where sampling takes 2.2, and reading
alone 1.4. *Prompts* go through torch's fused attention. Where a request lies in consecutive blocks, it is sliced.

Softmax is in float32 throughout.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from inferplane_kernels_cpu.attention_plan import (
    QUERY_TILE,
    AttentionPlan,
    Continuation,
    DecodeGroup,
    FreshPrompts,
    Rows,
    Slice,
)


class Scratch:
    """Buffers that live as long as the backend. A new large buffer each time would be paid for page by page."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """``size`` uninitialised elements, valid until the same name is taken again."""
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size]


def allocate_kv(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Uninitialised KV of one layer, ``[2, num_kv_heads, num_blocks, block_size, head_dim]``."""
    return torch.empty(2, num_kv_heads, num_blocks, block_size, head_dim, dtype=dtype)


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan) -> None:
    """Writes ``k, v: [num_tokens, num_kv_heads, head_dim]`` to their slots."""
    keys, values = _halves(kv)
    keys.index_copy_(0, plan.store_rows, k.reshape(-1, kv.shape[-1]))
    values.index_copy_(0, plan.store_rows, v.reshape(-1, kv.shape[-1]))


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    scratch: Scratch,
) -> torch.Tensor:
    """Causal attention of ``q: [num_tokens, num_heads, head_dim]`` over what is stored, this step's k and v included.

    ``k, v: [num_tokens, num_kv_heads, head_dim]`` must be in ``kv`` already; prompts without a past read them here,
    where they lie together. Returns a new tensor of q's shape and dtype.
    """
    if plan.decodes and plan.decode_tokens is None:
        return _decode(q, kv, plan.decodes, scale, scratch)
    out = q.new_empty(q.shape)
    if plan.decodes and plan.decode_tokens is not None:
        decoded = _decode(q.index_select(0, plan.decode_tokens), kv, plan.decodes, scale, scratch)
        out.index_copy_(0, plan.decode_tokens, decoded)
    for prompts in plan.fresh:
        _attend_fresh(prompts, q, k, v, scale, out)
    for continuation in plan.continuations:
        assert plan.causal_mask is not None
        _attend_continuation(continuation, q, kv, plan.causal_mask, scale, scratch, out)
    return out


def _decode(
    q: torch.Tensor, kv: torch.Tensor, decodes: list[Slice | DecodeGroup], scale: float, scratch: Scratch
) -> torch.Tensor:
    """``q: [num_reqs, num_heads, head_dim]`` in the order of ``decodes``; returns the same in q's dtype."""
    parts = []
    start = 0
    for decode in decodes:
        end = start + (decode.num_reqs if isinstance(decode, DecodeGroup) else 1)
        attend = _decode_group if isinstance(decode, DecodeGroup) else _decode_slice
        rows = q[start:end]
        parts.append(attend(rows.float(), kv, decode, scale, scratch).view(rows.shape))  # type: ignore[arg-type]
        start = end
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(q.dtype)


def _decode_group(
    q: torch.Tensor, kv: torch.Tensor, group: DecodeGroup, scale: float, scratch: Scratch
) -> torch.Tensor:
    """``q: [num_reqs, num_heads, head_dim]`` float32 -> ``[num_reqs * num_heads, head_dim]`` in kv's dtype."""
    keys, values = _halves(kv)
    if group.scores is not None:
        torch.sparse.sampled_addmm(
            group.scores, q.flatten(0, 1), keys.T, beta=0.0, alpha=scale, out=group.scores
        )
        scores = group.scores.values().view(group.num_reqs, -1, group.max_len)
    else:
        scores = _scores_of_gathered(q, keys, group, scale, scratch)
    if group.mask is not None:
        scores = (
            scores + group.mask
        )  # not in place: the next layer's product adds 0 times what stands in the scores
    weights = scores.softmax(-1).to(values.dtype).flatten()
    # (weights, rows, starts, scale_grad_by_freq, mode 0: sum, sparse, per_sample_weights)
    return torch.embedding_bag(values, group.rows, group.row_starts, False, 0, False, weights)[0]


def _scores_of_gathered(
    q: torch.Tensor, keys: torch.Tensor, group: DecodeGroup, scale: float, scratch: Scratch
) -> torch.Tensor:
    """``[num_reqs, num_heads, max_len]`` float32, with the queries of each KV head as the rows of one small matrix."""
    num_heads, head_dim = q.shape[1:]
    assert group.key_rows is not None
    gathered = scratch.take("gathered", group.key_rows.numel() * head_dim, keys.dtype).view(-1, head_dim)
    torch.index_select(keys, 0, group.key_rows, out=gathered)
    wide = _widen(gathered, scratch).view(-1, group.max_len, head_dim)
    rows = q.reshape(wide.shape[0], -1, head_dim)
    return _multiply(rows, wide, scale).view(group.num_reqs, num_heads, group.max_len)


def _decode_slice(
    q: torch.Tensor, kv: torch.Tensor, run: Slice, scale: float, scratch: Scratch
) -> torch.Tensor:
    """``q: [1, num_heads, head_dim]`` float32 -> ``[num_kv_heads, num_heads / num_kv_heads, head_dim]`` float32."""
    keys, values = _widen(kv.flatten(2, 3)[:, :, run.first_slot : run.first_slot + run.length], scratch)
    scores = _multiply(q.reshape(keys.shape[0], -1, keys.shape[2]), keys, scale)
    return torch.bmm(scores.softmax(-1), values)


def _multiply(rows: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """``scale * rows @ keys.T`` for each matrix of a batch."""
    return torch.baddbmm(rows.new_empty(()), rows, keys.transpose(1, 2), beta=0, alpha=scale)


def _widen(found: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """``found`` in float32; itself if it is so already."""
    if found.dtype == torch.float32:
        return found
    return scratch.take("widened", found.numel(), torch.float32).view(found.shape).copy_(found)


def _attend_fresh(
    prompts: FreshPrompts, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    end = prompts.first_token + prompts.num_reqs * prompts.query_len
    q, k, v, out = (
        x[prompts.first_token : end].unflatten(0, (prompts.num_reqs, prompts.query_len))
        for x in (q, k, v, out)
    )
    attended = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=True
    )
    out.copy_(attended.transpose(1, 2))


def _attend_continuation(
    continuation: Continuation,
    q: torch.Tensor,
    kv: torch.Tensor,
    causal_mask: torch.Tensor,
    scale: float,
    scratch: Scratch,
    out: torch.Tensor,
) -> None:
    """Tile by tile, each with the keys up to its own last query and no further."""
    keys, values = _fetch(continuation.stored, kv, scratch).unsqueeze(1)
    past_len = continuation.stored.length - continuation.query_len
    for first in range(0, continuation.query_len, QUERY_TILE):
        last = min(first + QUERY_TILE, continuation.query_len)
        rows = slice(continuation.first_token + first, continuation.first_token + last)
        end = past_len + last
        attended = scaled_dot_product_attention(
            q[rows].transpose(0, 1).unsqueeze(0),
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=causal_mask[-(last - first) :, -end:],
            scale=scale,
            enable_gqa=True,
        )
        out[rows] = attended[0].transpose(0, 1)


def _fetch(stored: Slice | Rows, kv: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """``[2, num_kv_heads, length, head_dim]`` of one request; a view where that is possible."""
    if isinstance(stored, Slice):
        return kv.flatten(2, 3)[:, :, stored.first_slot : stored.first_slot + stored.length]
    head_dim = kv.shape[-1]
    found = scratch.take("gathered", stored.both.numel() * head_dim, kv.dtype).view(-1, head_dim)
    torch.index_select(kv.view(-1, head_dim), 0, stored.both, out=found)
    return found.view(2, kv.shape[1], stored.length, head_dim)


def _halves(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each as rows ``[num_kv_heads * num_slots, head_dim]``."""
    keys, values = kv.view(2, -1, kv.shape[-1])
    return keys, values
