"""Attention: the point where a model meets the KV cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from inferplane.api.attention import AttentionLayer, LatentHeads
from inferplane.api.kv import (
    AttentionSpec,
    ChunkedLocalSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.layers.kv_scales import LayerKVScales
from inferplane.layers.layer import Layer
from inferplane.models.errors import ModelLoadError

QKNorm = tuple[torch.Tensor, torch.Tensor, float]
"""(weight of q, weight of k, eps) of norms on each head, each weight ``[head_dim]``."""


class Attention(Layer):
    """Causal attention. ``num_heads`` and ``num_kv_heads`` count this rank's."""

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        window: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
        latent_rope_dim: int | None = None,
        latent_heads: LatentHeads | None = None,
        kv_of: Attention | None = None,
    ) -> None:
        """``scale`` is the factor on q·k, ``head_dim ** -0.5`` if left out.

        A token sees all earlier ones; with ``window`` itself and the ``window - 1`` before it; with ``chunk`` those of
        its own chunk of so many tokens. ``sinks: [num_heads]`` float32 is kept as it is, to be filled at loading.
        With ``latent_rope_dim`` the only KV head is a latent and, in its last so many dimensions, the rotated part of
        the key: what is kept of a token is its key, and its value is the latent in it; with ``latent_heads`` the caller
        sees to the prompts in `ForwardBatch.expanded` itself. With ``kv_of`` it attends to the keys and values of that
        earlier layer, is called with those, and keeps none of its own.

        Raises `ModelLoadError` where both layers cannot have the same.
        """
        if window is not None and chunk is not None:
            raise ValueError(
                f"{prefix}: an attention layer has a window ({window}) or a chunk ({chunk}), not both"
            )
        self.kv_scales: LayerKVScales | None = None
        if ctx.config.kv_dtype.startswith("fp8"):
            self.kv_scales = LayerKVScales(ctx, prefix, num_kv_heads)
        self.description = AttentionLayer(
            name=prefix,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            spec=_spec(ctx, num_kv_heads, head_dim, window, chunk, latent_rope_dim),
            soft_cap=soft_cap,
            has_sinks=sinks is not None,
            kv_scales=None if self.kv_scales is None else self.kv_scales.scales,
            latent_heads=latent_heads,
        )
        self.backend = ctx.choose_attention(self.description)
        self.kv_of = kv_of
        self._name = prefix
        if kv_of is not None:
            if (kv_of.description.spec, kv_of.backend) != (self.description.spec, self.backend):
                raise ModelLoadError(
                    f"{prefix}: cannot attend to the keys and values of {kv_of.description.name}, which are kept as "
                    f"{kv_of.description.spec} by {kv_of.backend.name}, not as {self.description.spec} by "
                    f"{self.backend.name}"
                )
            self._name = kv_of._name
        self._forward = self.backend.forward
        self._rotary_forward = self.backend.rotary_forward
        if sinks is not None:
            self._forward = partial(self._forward, sinks=sinks)
            self._rotary_forward = partial(self._rotary_forward, sinks=sinks)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """``q: [num_tokens, num_heads, head_dim]``, ``k, v: [num_tokens, num_kv_heads, head_dim]``; returns like q.

        q, k and v may be views of one tensor. Of latents v is the first part of k, and the result as wide as v.
        """
        name = self._name
        return self._forward(self.description, q, k, v, batch.kv[name], batch.metadata[name])

    def rotary(
        self, qkv: torch.Tensor, batch: ForwardBatch, cos_sin: torch.Tensor, qk_norm: QKNorm | None
    ) -> torch.Tensor:
        """Norms, rotation and attention of a packed projection in one, by a backend with ``fuses_rotary``."""
        name = self._name
        return self._rotary_forward(
            self.description,
            qkv,
            batch.positions,
            cos_sin,
            batch.kv[name],
            batch.metadata[name],
            qk_norm=qk_norm,
        )


def _spec(
    ctx: BuildContext,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    chunk: int | None,
    latent_rope_dim: int | None,
) -> AttentionSpec:
    shape: dict[str, Any] = {
        "block_size": ctx.config.cache.block_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "dtype": ctx.config.kv_dtype,
    }
    if latent_rope_dim is not None:
        return MLAAttentionSpec(rope_dim=latent_rope_dim, **shape)
    # within its window or chunk a token sees every other, so that full attention says the same
    max_model_len = ctx.config.model.max_model_len
    if window is not None and window < max_model_len:
        return SlidingWindowSpec(window=window, **shape)
    if chunk is not None and chunk < max_model_len:
        return ChunkedLocalSpec(chunk=chunk, **shape)
    return FullAttentionSpec(**shape)
