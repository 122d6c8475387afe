"""Norms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from inferplane.api.model import BuildContext
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.parallel import Share


class Norm(Layer):
    """Over the last dimension, which every rank has whole."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., size] -> [..., size]``; x is not changed."""

    @abstractmethod
    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; without a residual yet, ``(norm(x), x)``. Both may be overwritten."""


class RMSNorm(Norm):
    """Root-mean-square norm. ``weight_offset`` is added to the checkpoint's weight, which some models keep around 0."""

    def __init__(
        self, ctx: BuildContext, prefix: str, size: int, eps: float, *, weight_offset: float = 0.0
    ) -> None:
        self._name = f"{prefix}.weight"
        self.weight = torch.empty(size, dtype=ctx.dtype, device=ctx.device)
        self._weight_offset = weight_offset
        self.eps = eps
        self._rms_norm = ctx.ops.rms_norm
        self._add_rms_norm = ctx.ops.add_rms_norm

    def weight_slots(self) -> Sequence[WeightSlot]:
        return [WeightSlot(self._name, tuple(self.weight.shape), self._copy)]

    def _copy(self, tensor: torch.Tensor) -> None:
        # the sum is rounded once, from the checkpoint's numbers
        self.weight.copy_(tensor.float() + self._weight_offset if self._weight_offset else tensor)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self._rms_norm(x, self.weight, self.eps), x
        return self._add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(Norm):
    """Mean and variance norm (arXiv:1607.06450)."""

    def __init__(self, ctx: BuildContext, prefix: str, size: int, eps: float, *, bias: bool = True) -> None:
        self._prefix = prefix
        self._weight = torch.empty(size, dtype=ctx.dtype, device=ctx.device)
        self._bias = torch.empty_like(self._weight) if bias else None
        self._eps = eps

    def weight_slots(self) -> Sequence[WeightSlot]:
        tensors = (
            {"weight": self._weight} if self._bias is None else {"weight": self._weight, "bias": self._bias}
        )
        return [WeightSlot(f"{self._prefix}.{name}", tuple(x.shape), x.copy_) for name, x in tensors.items()]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if residual is None else x + residual
        return self(total), total


class AllHeadsRMSNorm(Layer):
    """Root-mean-square norm over all heads of q or k together, those of other ranks included.

    ``heads`` are this rank's; where several ranks keep the same head, all heads are kept by equally many.
    """

    def __init__(self, ctx: BuildContext, prefix: str, heads: Share, head_dim: int, eps: float) -> None:
        self._name = f"{prefix}.weight"
        self._rows = heads.scaled(head_dim)
        self._weight = torch.empty(self._rows.size, dtype=ctx.dtype, device=ctx.device)
        self._eps = eps
        self._comm = ctx.comm
        self._rms_norm = ctx.ops.rms_norm

    def weight_slots(self) -> Sequence[WeightSlot]:
        return [
            WeightSlot(
                self._name, (self._rows.total,), lambda whole: self._weight.copy_(whole[self._rows.span])
            )
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, heads, head_dim]`` to the same."""
        flat = x.flatten(1)
        if self._comm.world_size == 1:
            return self._rms_norm(flat, self._weight, self._eps).view(x.shape)
        wide = flat.float()
        mean_square = self._comm.all_reduce(wide.pow(2).mean(-1, keepdim=True)) / self._comm.world_size
        normed = wide * torch.rsqrt(mean_square + self._eps)
        return (self._weight * normed.to(x.dtype)).view(x.shape)
