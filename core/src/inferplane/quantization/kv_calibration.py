"""Scales of an fp8 KV cache, from the largest keys and values of each layer on a text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from inferplane.api.attention import AttentionLayer
from inferplane.api.model import BuildContext
from inferplane.reference.attention import ReferenceAttention

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


class KVCalibration(ReferenceAttention):
    """Attention that notes what it is given. Builds a model through `context`, which a text then runs through."""

    def __init__(self) -> None:
        super().__init__()
        self._largest: dict[str, tuple[float, float]] = {}

    def context(self, plain: BuildContext) -> BuildContext:
        return replace(plain, choose_attention=lambda layer: self)

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: torch.Tensor,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found = (k.abs().max().item(), v.abs().max().item())
        known = self._largest.get(layer.name, found)
        self._largest[layer.name] = (max(found[0], known[0]), max(found[1], known[1]))
        return super().forward(layer, q, k, v, kv, metadata, sinks=sinks)

    def tensors(self) -> dict[str, torch.Tensor]:
        """``k_scale`` and ``v_scale`` of each layer, ``[1]`` float32, as compressed-tensors names them: the largest
        number becomes the largest of e4m3; 1 where all are zero."""
        return {
            f"{name}.{part}_scale": torch.tensor([largest / _LARGEST or 1.0])
            for name, pair in self._largest.items()
            for part, largest in zip("kv", pair)
        }
