"""Attention over a compressed latent (arXiv:2405.04434), with its projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inferplane.api.attention import LatentHeads
from inferplane.api.latents import ExpandedPrompts
from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.layers.attention import Attention
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.linear import Linear, ReplicatedLinear, RowParallelLinear
from inferplane.layers.norm import RMSNorm
from inferplane.layers.parallel import Rows, Share, even_share, whole
from inferplane.layers.qkv import half_split_order
from inferplane.layers.rope import RotaryEmbedding
from inferplane.layers.stored import MatrixFilling, stored_matrix
from inferplane.reference.kv_numbers import indexable, read, row_size, write

EXPANDED_BYTES = 128 << 20
"""Keys and values that are made of latents at once. A single head of a very long context may take more."""


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of one layer, over all ranks."""

    num_heads: int
    q_rank: int | None
    """Of the queries' own compression, where there is one."""
    kv_rank: int
    """Of the latent that keys and values are made from."""
    nope_dim: int
    """Dimensions of a head that positions do not turn."""
    rope_dim: int
    """Those that they turn; keys have them once for all heads."""
    v_dim: int


class LatentAttention(Layer):
    """Keys and values are made from one latent a token, and what is kept for a token is that and its rotated part.

    Absorbed, the matrices that make keys and values are multiplied into queries and results instead, so that every head
    attends to the latents themselves: one KV head of ``kv_rank + rope_dim`` dimensions, whose value is its first
    ``kv_rank``. Long prompts are expanded: heads attend to keys and values that are made of the latents
    (`inferplane.api.latents` says when).
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        hidden_size: int,
        shape: LatentShape,
        *,
        rope: RotaryEmbedding,
        scale: float,
        norm_eps: float = 1e-6,
        bias: bool = False,
    ) -> None:
        self._shape = shape
        self._rope = rope
        heads = even_share(shape.num_heads, ctx.comm, f"{prefix}: number of attention heads")
        self._num_heads = heads.size
        q_input, q_name = hidden_size, "q_proj"
        self.q_a_proj: Linear | None = None
        self.q_a_norm: RMSNorm | None = None
        if shape.q_rank is not None:
            self.q_a_proj = ReplicatedLinear(ctx, f"{prefix}.q_a_proj", hidden_size, shape.q_rank, bias=bias)
            self.q_a_norm = RMSNorm(ctx, f"{prefix}.q_a_layernorm", shape.q_rank, norm_eps)
            q_input, q_name = shape.q_rank, "q_b_proj"
        q_rows = _rows(heads, shape.nope_dim, shape.rope_dim, rope.interleaved_dim)
        self.q_proj = Linear(ctx, {f"{prefix}.{q_name}": q_rows}, whole(q_input), bias=False)
        latent_rows = _rows(whole(1), shape.kv_rank, shape.rope_dim, rope.interleaved_dim)
        self.kv_a_proj = Linear(
            ctx, {f"{prefix}.kv_a_proj_with_mqa": latent_rows}, whole(hidden_size), bias=bias
        )
        self.kv_a_norm = RMSNorm(ctx, f"{prefix}.kv_a_layernorm", shape.kv_rank, norm_eps)
        self.kv_b = _KeysAndValues(ctx, f"{prefix}.kv_b_proj", heads, shape)
        self.attention = Attention(
            ctx,
            prefix,
            num_heads=heads.size,
            num_kv_heads=1,
            head_dim=shape.kv_rank + shape.rope_dim,
            scale=scale,
            latent_rope_dim=shape.rope_dim,
            latent_heads=LatentHeads(nope_dim=shape.nope_dim, value_dim=shape.v_dim),
        )
        self._causal_attention = ctx.ops.causal_attention
        self.o_proj = RowParallelLinear(
            ctx, f"{prefix}.o_proj", shape.num_heads * shape.v_dim, hidden_size, bias=bias
        )

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        shape = self._shape
        q_input = hidden
        if self.q_a_proj is not None and self.q_a_norm is not None:
            q_input = self.q_a_norm(self.q_a_proj(hidden))
        q = self.q_proj(q_input).view(-1, self._num_heads, shape.nope_dim + shape.rope_dim)
        q_nope, q_rope = q.split_with_sizes((shape.nope_dim, shape.rope_dim), -1)
        latent, k_rope = self.kv_a_proj(hidden).split_with_sizes((shape.kv_rank, shape.rope_dim), -1)
        q_rope, k_rope = self._rope(q_rope, k_rope.unsqueeze(1), batch.positions)
        k = torch.cat([self.kv_a_norm(latent).unsqueeze(1), k_rope], -1)
        prompts = batch.expanded.get(self.attention.description.name)
        if prompts is None:
            return self.o_proj(self._absorbed(q_nope, q_rope, k, batch).flatten(1))
        num_before = len(k) - prompts.num_tokens
        before, behind = slice(num_before), slice(num_before, None)
        attended = self._expanded(torch.cat([q_nope[behind], q_rope[behind]], -1), k[behind], batch, prompts)
        if num_before:
            served = self._absorbed(q_nope[before], q_rope[before], k[before], batch)
            attended = torch.cat([served, attended])
        return self.o_proj(attended.flatten(1))

    def _absorbed(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, k: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Of requests that the backend serves: ``[num_tokens, num_heads, v_dim]``."""
        q = torch.cat([self.kv_b.absorb(q_nope), q_rope], -1)
        return self.kv_b.values(self.attention(q, k, k[..., : self._shape.kv_rank], batch))

    def _expanded(
        self, q: torch.Tensor, k: torch.Tensor, batch: ForwardBatch, prompts: ExpandedPrompts
    ) -> torch.Tensor:
        """Stores the latents ``k: [num_tokens, 1, kv_rank + rope_dim]``, then attends to keys and values made of those
        of the whole sequences: ``[num_tokens, num_heads, v_dim]``. A few heads at a time, which bounds the memory."""
        description = self.attention.description
        kv, scales = batch.kv[description.name], description.kv_scales
        rows = kv.view(-1, 1, row_size(description.head_dim, kv.dtype))
        k_scales = None if scales is None else scales.k
        write(k, rows, prompts.slots, k_scales)
        stored = indexable(rows).index_select(0, prompts.key_slots).view(kv.dtype)
        latents = read(stored, k_scales).to(q.dtype).squeeze(1)
        head_bytes = len(latents) * (q.shape[2] + self._shape.v_dim) * q.element_size()
        num_at_once = max(1, EXPANDED_BYTES // head_bytes)
        out = q.new_empty(*q.shape[:2], self._shape.v_dim)
        for first in range(0, self._num_heads, num_at_once):
            heads = slice(first, first + num_at_once)
            out[:, heads] = self._causal_attention(
                q[:, heads],
                *self.kv_b.expand(latents, heads),
                prompts.query_lens,
                prompts.query_starts,
                prompts.key_lens,
                prompts.key_starts,
                description.scale,
            )
        return out


class _KeysAndValues(Layer):
    """The matrix that makes each head's keys and values from the latent, used from its other side."""

    def __init__(self, ctx: BuildContext, prefix: str, heads: Share, shape: LatentShape) -> None:
        self._name = f"{prefix}.weight"
        self._heads = heads
        num_rows = heads.total * (shape.nope_dim + shape.v_dim)
        matrix = stored_matrix(ctx, prefix, num_rows, shape.kv_rank)
        self._stored = None if matrix is None else MatrixFilling(ctx, matrix, self._copy)
        self._shape = shape
        empty = {"dtype": ctx.dtype, "device": ctx.device}
        self._to_key = torch.empty(heads.size, shape.nope_dim, shape.kv_rank, **empty)
        self._to_value = torch.empty(heads.size, shape.v_dim, shape.kv_rank, **empty)

    def weight_slots(self) -> Sequence[WeightSlot]:
        if self._stored is not None:
            return self._stored.slots()
        num_rows = self._heads.total * (self._shape.nope_dim + self._shape.v_dim)
        return [WeightSlot(self._name, (num_rows, self._shape.kv_rank), self._copy)]

    def finish_loading(self) -> None:
        if self._stored is not None:
            self._stored.finish()

    def _copy(self, tensor: torch.Tensor) -> None:
        of_heads = tensor.unflatten(0, (self._heads.total, -1))[self._heads.span]
        self._to_key.copy_(of_heads[:, : self._shape.nope_dim])
        self._to_value.copy_(of_heads[:, self._shape.nope_dim :])

    def expand(self, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """``[num_keys, kv_rank + rope_dim]`` to the keys ``[num_keys, heads, nope_dim + rope_dim]`` and values
        ``[num_keys, heads, v_dim]`` of some heads."""
        latent, rotated = latents.split_with_sizes((self._shape.kv_rank, self._shape.rope_dim), -1)
        keys, values = (
            torch.nn.functional.linear(latent, matrix[heads].flatten(0, 1)).unflatten(
                1, (-1, matrix.shape[1])
            )
            for matrix in (self._to_key, self._to_value)
        )
        rotated = rotated.unsqueeze(1).expand(-1, keys.shape[1], -1)
        return torch.cat([keys, rotated], -1), values

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, num_heads, nope_dim] -> [num_tokens, num_heads, kv_rank]``"""
        return torch.bmm(q_nope.transpose(0, 1), self._to_key).transpose(0, 1)

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, num_heads, kv_rank] -> [num_tokens, num_heads, v_dim]``"""
        return torch.bmm(attended.transpose(0, 1), self._to_value.transpose(1, 2)).transpose(0, 1)


def _rows(heads: Share, first_dim: int, rope_dim: int, interleaved_dim: int) -> Rows:
    """Rows of heads whose last ``rope_dim`` dimensions are turned; see `QKVParallelLinear` on their order."""
    size = first_dim + rope_dim
    order = torch.cat([torch.arange(first_dim), first_dim + half_split_order(rope_dim, interleaved_dim)])
    places = torch.arange(heads.start, heads.start + heads.size).unsqueeze(1)
    return Rows(heads.total * size, (places * size + order).flatten())
