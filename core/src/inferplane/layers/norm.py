"""Norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.api.model import BuildContext
from inferplane.layers.layer import Layer, WeightSlot


class RMSNorm(Layer):
    """Root-mean-square norm over the last dimension, which every rank has whole."""

    def __init__(self, ctx: BuildContext, prefix: str, size: int, eps: float) -> None:
        self._name = f"{prefix}.weight"
        self._weight = torch.empty(size, dtype=ctx.dtype, device=ctx.device)
        self._eps = eps
        self._rms_norm = ctx.ops.rms_norm
        self._add_rms_norm = ctx.ops.add_rms_norm

    def weight_slots(self) -> Sequence[WeightSlot]:
        return [WeightSlot(self._name, tuple(self._weight.shape), self._weight.copy_)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size] -> [..., size]``; x is not changed."""
        return self._rms_norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; without a residual yet, ``(norm(x), x)``. Both may be overwritten."""
        if residual is None:
            return self._rms_norm(x, self._weight, self._eps), x
        return self._add_rms_norm(x, residual, self._weight, self._eps)
