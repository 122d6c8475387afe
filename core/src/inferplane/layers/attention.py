"""Attention: the point where a model meets the KV cache."""

from __future__ import annotations

import torch

from inferplane.api.attention import AttentionLayer
from inferplane.api.kv import FullAttentionSpec
from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.layers.layer import Layer


class Attention(Layer):
    """Causal attention over all earlier tokens. ``num_heads`` and ``num_kv_heads`` count this rank's."""

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
    ) -> None:
        """``scale`` is the factor on q·k, ``head_dim ** -0.5`` if left out."""
        spec = FullAttentionSpec(
            block_size=ctx.config.cache.block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=ctx.config.model.dtype,
        )
        self.description = AttentionLayer(
            name=prefix,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            spec=spec,
        )
        self.backend = ctx.choose_attention(self.description)
        self._name = prefix
        self._forward = self.backend.forward

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """``q: [num_tokens, num_heads, head_dim]``, ``k, v: [num_tokens, num_kv_heads, head_dim]``; returns like q.

        q, k and v may be views of one tensor.
        """
        name = self._name
        return self._forward(self.description, q, k, v, batch.kv[name], batch.metadata[name])
