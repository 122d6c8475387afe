"""Attention over a compressed latent (arXiv:2405.04434), with its projections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.layers.attention import Attention
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.linear import Linear, ReplicatedLinear, RowParallelLinear
from inferplane.layers.norm import RMSNorm
from inferplane.layers.parallel import Rows, Share, even_share, whole
from inferplane.layers.qkv import half_split_order
from inferplane.layers.rope import RotaryEmbedding
from inferplane.layers.stored import MatrixFilling, stored_matrix


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

    The matrices that make keys and values are multiplied into queries and results instead, so that every head attends
    to the latents themselves: one KV head of ``kv_rank + rope_dim`` dimensions, whose value is its first ``kv_rank``.
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
        )
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
        q = torch.cat([self.kv_b.absorb(q_nope), q_rope], -1)
        attended = self.attention(q, k, k[..., : shape.kv_rank], batch)
        return self.o_proj(self.kv_b.values(attended).flatten(1))


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
