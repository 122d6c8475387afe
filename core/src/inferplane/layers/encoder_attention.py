"""Attention without a cache, in both directions."""

from __future__ import annotations

import torch

from inferplane.api.kv import EncoderAttentionSpec
from inferplane.api.model import BuildContext, EncoderLayer, ForwardBatch
from inferplane.layers.layer import Layer


class EncoderAttention(Layer):
    """Every token attends to the whole of its own sequence, or to those at most ``window`` away from it."""

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        *,
        head_dim: int,
        scale: float | None = None,
        window: int | None = None,
    ) -> None:
        self.description = EncoderLayer(name=prefix, spec=EncoderAttentionSpec(window=window))
        self._scale = head_dim**-0.5 if scale is None else scale
        self._window = window
        self._attend = ctx.ops.encoder_attention

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """``q: [num_tokens, num_heads, head_dim]``, ``k, v: [num_tokens, num_kv_heads, head_dim]``; returns like q."""
        return self._attend(q, k, v, batch.query_lens_host, batch.query_start, self._scale, self._window)
