"""Attention over a paged KV cache with torch's own products, in three ways for three kinds of request.

*Decoding* reads keys and values where they lie, with two products that take row numbers: scores are sampled from
``q @ all_keys.T`` at each request's rows, and outputs are weighted bags of value rows. Gathering first and multiplying
then, which is what the half precisions still do for keys, moves each byte three times instead of once: for 64 requests
of 160 tokens (9 query heads, 3 KV heads of 64, float32, cold) 4.2 ms on 2 cores where sampling takes 2.2, and reading
alone 1.4. *Prompts* go through torch's fused attention. Where a request lies in consecutive blocks, it is sliced.

Softmax is in float32 throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from inferplane_kernels_cpu.attention_plan import (
    AttentionPlan,
    Continuation,
    DecodeGroup,
    FreshPrompts,
    Rows,
    Slice,
    Tile,
)


@dataclass(frozen=True)
class Scoring:
    """What becomes of products of queries and keys."""

    scale: float
    soft_cap: float | None = None
    """Scaled scores become ``soft_cap * tanh(score / soft_cap)``."""
    sinks: torch.Tensor | None = None
    """``[num_heads]`` float32: a logit of each head that joins the softmax's denominator."""

    @property
    def is_plain(self) -> bool:
        return self.soft_cap is None and self.sinks is None


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
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    is_latent: bool = False,
) -> torch.Tensor:
    """Uninitialised KV of one layer, ``[2, num_kv_heads, num_blocks, block_size, head_dim]``, or with ``is_latent``,
    where keys are values, too, ``[1, …]``."""
    return torch.empty(1 if is_latent else 2, num_kv_heads, num_blocks, block_size, head_dim, dtype=dtype)


def store_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan) -> None:
    """Writes ``k, v: [num_tokens, num_kv_heads, head_dim]`` to their slots; of latents, which are both, k alone."""
    keys, values = _halves(kv)
    keys.index_copy_(0, plan.store_rows, k.reshape(-1, kv.shape[-1]))
    if kv.shape[0] == 2:
        values.index_copy_(0, plan.store_rows, v.reshape(-1, kv.shape[-1]))


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    scoring: Scoring,
    scratch: Scratch,
) -> torch.Tensor:
    """Causal attention of ``q: [num_tokens, num_heads, head_dim]`` over what is stored, this step's k and v included.

    ``k, v: [num_tokens, num_kv_heads, head_dim]``, of latents k twice, must be in ``kv`` already; prompts without a
    past read them here, where they lie together. The plan was made with ``may_fuse`` only if scoring is plain. Returns
    a new tensor of q's shape and dtype.
    """
    if plan.decodes and plan.decode_tokens is None:
        return _decode(q, kv, plan.decodes, scoring, scratch)
    out = q.new_empty(q.shape)
    if plan.decodes and plan.decode_tokens is not None:
        decoded = _decode(q.index_select(0, plan.decode_tokens), kv, plan.decodes, scoring, scratch)
        out.index_copy_(0, plan.decode_tokens, decoded)
    for prompts in plan.fresh:
        _attend_fresh(prompts, q, k, v, scoring.scale, out)
    for continuation in plan.continuations:
        _attend_continuation(continuation, q, kv, scoring, scratch, out)
    return out


def _decode(
    q: torch.Tensor, kv: torch.Tensor, decodes: list[Slice | DecodeGroup], scoring: Scoring, scratch: Scratch
) -> torch.Tensor:
    """``q: [num_reqs, num_heads, head_dim]`` in the order of ``decodes``; returns the same in q's dtype."""
    parts = []
    start = 0
    for decode in decodes:
        end = start + (decode.num_reqs if isinstance(decode, DecodeGroup) else 1)
        attend = _decode_group if isinstance(decode, DecodeGroup) else _decode_slice
        rows = q[start:end]
        parts.append(attend(rows.float(), kv, decode, scoring, scratch).view(rows.shape))  # type: ignore[arg-type]
        start = end
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(q.dtype)


def _decode_group(
    q: torch.Tensor, kv: torch.Tensor, group: DecodeGroup, scoring: Scoring, scratch: Scratch
) -> torch.Tensor:
    """``q: [num_reqs, num_heads, head_dim]`` float32 -> ``[num_reqs * num_heads, head_dim]`` in kv's dtype."""
    keys, values = _halves(kv)
    if group.scores is not None:
        torch.sparse.sampled_addmm(
            group.scores, q.flatten(0, 1), keys.T, beta=0.0, alpha=scoring.scale, out=group.scores
        )
        scores = group.scores.values().view(group.num_reqs, -1, group.max_len)
    else:
        scores = _scores_of_gathered(q, keys, group, scoring.scale, scratch)
    weights = _weights(scores, group.mask, scoring).to(values.dtype).flatten()
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
    q: torch.Tensor, kv: torch.Tensor, run: Slice, scoring: Scoring, scratch: Scratch
) -> torch.Tensor:
    """``q: [1, num_heads, head_dim]`` float32 -> ``[num_kv_heads, num_heads / num_kv_heads, head_dim]`` float32."""
    found = _widen(kv.flatten(2, 3)[:, :, run.first_slot : run.first_slot + run.length], scratch)
    keys, values = found[0], found[-1]
    scores = _multiply(q.reshape(keys.shape[0], -1, keys.shape[2]), keys, scoring.scale)
    weights = _weights(scores.view(1, q.shape[1], -1), None, scoring)
    return torch.bmm(weights.view(scores.shape), values)


def _weights(scores: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring) -> torch.Tensor:
    """Softmax of ``[n, num_heads, keys]`` over the keys, float32. Not in place: a layer's next product may add 0 times
    what stands in the scores."""
    if scoring.soft_cap is not None:
        scores = (scores / scoring.soft_cap).tanh_().mul_(scoring.soft_cap)
    if mask is not None:
        scores = scores + mask
    if scoring.sinks is None:
        return scores.softmax(-1)
    sinks = scoring.sinks.view(1, -1, 1)
    highest = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = (scores - highest).exp_()
    return weights.div_(weights.sum(-1, keepdim=True) + (sinks - highest).exp_())


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
    scoring: Scoring,
    scratch: Scratch,
    out: torch.Tensor,
) -> None:
    found = _fetch(continuation.stored, kv, scratch)
    keys, values = found[0], found[-1]
    for tile in continuation.tiles:
        rows = slice(tile.first_query, tile.end_query)
        attend = _attend_tile if scoring.is_plain else _attend_tile_in_steps
        seen = slice(tile.first_key, tile.end_key)
        out[rows] = attend(q[rows], keys[:, seen], values[:, seen], tile, scoring)


def _attend_tile(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: Tile, scoring: Scoring
) -> torch.Tensor:
    """``q: [queries, num_heads, head_dim]``, ``keys, values: [num_kv_heads, seen, head_dim]``; returns like q."""
    attended = scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=tile.mask,
        scale=scoring.scale,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


def _attend_tile_in_steps(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tile: Tile, scoring: Scoring
) -> torch.Tensor:
    """The same with scores that torch's fused attention does not know, one KV head at a time to keep them small."""
    num_queries, num_heads, head_dim = q.shape
    per_head = num_heads // keys.shape[0]
    out = torch.empty(num_heads, num_queries, head_dim, dtype=q.dtype)
    mask = tile.mask.float().unsqueeze(1)
    for head in range(keys.shape[0]):
        own = slice(head * per_head, (head + 1) * per_head)
        scores = torch.einsum("qhd,kd->qhk", q[:, own].float(), keys[head].float()) * scoring.scale
        sinks = None if scoring.sinks is None else scoring.sinks[own]
        weights = _weights(scores, mask, replace(scoring, sinks=sinks))
        out[own] = torch.einsum("qhk,kd->hqd", weights, values[head].float()).to(q.dtype)
    return out.transpose(0, 1)


def _fetch(stored: Slice | Rows, kv: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """``[num_halves, num_kv_heads, length, head_dim]`` of one request; a view where that is possible."""
    if isinstance(stored, Slice):
        return kv.flatten(2, 3)[:, :, stored.first_slot : stored.first_slot + stored.length]
    head_dim = kv.shape[-1]
    found = scratch.take("gathered", stored.both.numel() * head_dim, kv.dtype).view(-1, head_dim)
    torch.index_select(kv.view(-1, head_dim), 0, stored.both, out=found)
    return found.view(*kv.shape[:2], stored.length, head_dim)


def _halves(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each as rows ``[num_kv_heads * num_slots, head_dim]``; the same rows where they are one."""
    halves = kv.view(kv.shape[0], -1, kv.shape[-1])
    return halves[0], halves[-1]
