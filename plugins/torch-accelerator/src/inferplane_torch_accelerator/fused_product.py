"""What every product by Triton kernels does around itself: norm before it, gate and activation behind it."""

from __future__ import annotations

from abc import abstractmethod

import torch

from inferplane.api.linear import FusedMultiply
from inferplane_kernels_triton.activation import silu_and_mul
from inferplane_kernels_triton.matvec import NormBefore
from inferplane_kernels_triton.norm import add_rms_norm, rms_norm


class FusedProduct(FusedMultiply):
    """How many rows there are decides anew at each call; a graph keeps what its number of rows chose.

    One row takes norm, bias and gate along; more come normed, and how is the product's own business.
    """

    def __init__(self, bias: torch.Tensor | None, *, pdl: bool) -> None:
        self._bias = bias
        self._pdl = pdl

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()  # the kernels read rows; a mixer over time leaves columns
        if x.shape[0] == 1:
            return self._one_row(x)
        return self._more_rows(x)

    def after_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        is_gated: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if x.shape[0] == 1:
            total = x if residual is None else torch.empty_like(x)
            norm = NormBefore(weight, eps, residual, None if residual is None else total)
            return self._one_row(x, norm, is_gated), total
        if residual is None:
            normed, total = rms_norm(x, weight, eps, pdl=self._pdl), x
        else:
            normed, total = add_rms_norm(x, residual, weight, eps, pdl=self._pdl)
        return (self.silu_and_mul(normed) if is_gated else self(normed)), total

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return self._one_row(x, None, True)
        return self._more_rows_gated(x)

    @abstractmethod
    def _more_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The product with any number of rows, bias included."""

    def _more_rows_gated(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(self._more_rows(x), pdl=self._pdl)

    @abstractmethod
    def _one_row(
        self, x: torch.Tensor, norm: NormBefore | None = None, is_gated: bool = False
    ) -> torch.Tensor:
        """``x: [1, in]``; everything included."""
