"""Products of one row by a Triton kernel, and of more by torch's library, with norm and gate along."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch.nn.functional import linear

from inferplane.api.linear import FusedMultiply
from inferplane_kernels_triton.activation import silu_and_mul
from inferplane_kernels_triton.matvec import MatvecConfig, NormBefore, matvec
from inferplane_kernels_triton.norm import add_rms_norm, rms_norm
from inferplane_torch_accelerator.launch import Launch


class FusedProduct(FusedMultiply):
    """How many rows there are decides anew at each call; a graph keeps what its number of rows chose.

    ``weight: [out, in]`` in any type that the kernel of one row reads, with ``scale: [out]`` float32 where it has one.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        launch: Launch,
        scale: torch.Tensor | None = None,
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._scale = scale
        self._pdl = launch.pdl
        self._matvec_config = launch.config(
            "matvec", (weight.shape[0], weight.shape[1]), MatvecConfig(), weight
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
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
        return silu_and_mul(self._more_rows(x), pdl=self._pdl)

    @abstractmethod
    def _more_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The product with any number of rows, bias included."""

    def _one_row(
        self, x: torch.Tensor, norm: NormBefore | None = None, is_gated: bool = False
    ) -> torch.Tensor:
        return matvec(
            x,
            self._weight,
            norm=norm,
            weight_scale=self._scale,
            bias=self._bias,
            gated=is_gated,
            config=self._matvec_config,
            pdl=self._pdl,
        )


class DenseMultiply(FusedProduct):
    """A plain weight."""

    def _more_rows(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._weight, self._bias)
