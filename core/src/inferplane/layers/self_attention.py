"""Self-attention with its projections: what stands between two norms of a decoder block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.layers.attention import Attention
from inferplane.layers.layer import Layer
from inferplane.layers.linear import QKVParallelLinear, RowParallelLinear
from inferplane.layers.norm import Norm
from inferplane.layers.rope import RotaryEmbedding


@dataclass(frozen=True)
class Heads:
    """Of one attention layer, over all ranks."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class SelfAttention(Layer):
    """Projections to q, k and v, norms on q and k, rotary embedding, attention, projection back.

    Tensors are ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` below ``prefix``. ``rope`` is None where positions do
    not turn queries and keys. ``q_norm`` and ``k_norm`` act on each head.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        hidden_size: int,
        heads: Heads,
        *,
        rope: RotaryEmbedding | None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        scale: float | None = None,
    ) -> None:
        """``scale`` is the factor on q·k, ``head_dim ** -0.5`` if left out."""
        head_dim = heads.head_dim
        self.qkv_proj = QKVParallelLinear(
            ctx,
            prefix,
            hidden_size,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=head_dim,
            bias=qkv_bias,
        )
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self._split = (num_heads, num_kv_heads, num_kv_heads)
        self._head_shape = (-1, sum(self._split), head_dim)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.rope = rope
        self.attention = Attention(
            ctx, prefix, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale
        )
        self.o_proj = RowParallelLinear(
            ctx, f"{prefix}.o_proj", heads.num_heads * head_dim, hidden_size, bias=output_bias
        )

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        qkv = self.qkv_proj(hidden).view(self._head_shape)
        q, k, v = qkv.split_with_sizes(self._split, 1)
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if self.rope is not None:
            q, k = self.rope(q, k, batch.positions)
        return self.o_proj(self.attention(q, k, v, batch).flatten(1))
