"""Decoder blocks: how attention, feed-forward and norms are put together."""

from __future__ import annotations

import torch

from inferplane.api.model import ForwardBatch
from inferplane.layers.layer import Layer
from inferplane.layers.mlp import GatedMLP
from inferplane.layers.norm import Norm
from inferplane.layers.self_attention import SelfAttention

Stream = tuple[torch.Tensor, torch.Tensor | None]
"""``(hidden, residual)``, whose sum is the hidden state: it is left to the next norm, which makes both in one op.
A product that can add at less cost leaves no residual."""


class SequentialBlock(Layer):
    """``x + post(attention(pre(x)))``, then the same with the feed-forward block.

    Each of the four norms may be absent. ``residual_scale`` multiplies what is added.
    """

    def __init__(
        self,
        *,
        attention: Layer,
        mlp: Layer,
        attention_norm: Norm | None = None,
        mlp_norm: Norm | None = None,
        post_attention_norm: Norm | None = None,
        post_mlp_norm: Norm | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.post_mlp_norm = post_mlp_norm
        self._residual_scale = residual_scale
        self._attention_is_bare = post_attention_norm is None and residual_scale == 1.0
        self._mlp_is_bare = post_mlp_norm is None and residual_scale == 1.0

    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> Stream:
        """``rows``: of the tokens that go on after attention, which needs them all; None for all."""
        if self.attention_norm is not None and isinstance(self.attention, SelfAttention):
            hidden, residual = self.attention.after_norm(
                self.attention_norm, hidden, residual, batch, rows=rows, is_bare=self._attention_is_bare
            )
        else:
            hidden, residual = _enter(self.attention_norm, hidden, residual)
            hidden = self.attention(hidden, batch)
            if rows is not None:
                hidden, residual = hidden.index_select(0, rows), residual.index_select(0, rows)
        hidden = self._leave(self.post_attention_norm, hidden)
        if self.mlp_norm is not None and isinstance(self.mlp, GatedMLP):
            hidden, residual = self.mlp.after_norm(self.mlp_norm, hidden, residual, is_bare=self._mlp_is_bare)
        else:
            hidden, residual = _enter(self.mlp_norm, hidden, residual)
            hidden = self.mlp(hidden)
        return self._leave(self.post_mlp_norm, hidden), residual

    def _leave(self, norm: Norm | None, hidden: torch.Tensor) -> torch.Tensor:
        if norm is not None:
            hidden = norm(hidden)
        return hidden if self._residual_scale == 1.0 else hidden * self._residual_scale


class PostNormBlock(Layer):
    """``norm(x + attention(x))``, then the same with the feed-forward block, as in the first transformers
    (arXiv:1706.03762)."""

    def __init__(self, *, attention: Layer, attention_norm: Norm, mlp: Layer, mlp_norm: Norm) -> None:
        self.attention = attention
        self.attention_norm = attention_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        """There is no residual beside ``hidden``: each norm takes both in."""
        hidden = self.attention_norm.add(self.attention(hidden, batch), hidden)[0]
        return self.mlp_norm.add(self.mlp(hidden), hidden)[0], None


class ParallelBlock(Layer):
    """``x + attention(norm(x)) + mlp(norm(x))``, with one norm for both or one for each."""

    def __init__(
        self, *, attention: Layer, mlp: Layer, attention_norm: Norm, mlp_norm: Norm | None = None
    ) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        normed, residual = self.attention_norm.add(hidden, residual)
        mlp_input = normed if self.mlp_norm is None else self.mlp_norm(residual)
        return self.attention(normed, batch) + self.mlp(mlp_input), residual


class MixerBlock(Layer):
    """``x + mixer(norm(x))``, where a mixer is whatever takes a hidden state and the step."""

    def __init__(self, norm: Norm, mixer: Layer) -> None:
        self.norm = norm
        self.mixer = mixer

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Stream:
        hidden, residual = self.norm.add(hidden, residual)
        return self.mixer(hidden, batch), residual


def _enter(
    norm: Norm | None, hidden: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if norm is not None:
        return norm.add(hidden, residual)
    total = hidden if residual is None else hidden + residual
    return total, total
