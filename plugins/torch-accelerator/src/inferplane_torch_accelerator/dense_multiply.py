"""A plain weight, multiplied by a Triton kernel where there is one row and by torch's library where there are more."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from inferplane.api.linear import FusedMultiply
from inferplane_kernels_triton.activation import silu_and_mul
from inferplane_kernels_triton.matvec import MatvecConfig, NormBefore, matvec
from inferplane_kernels_triton.norm import add_rms_norm, rms_norm
from inferplane_torch_accelerator.launch import Launch


class DenseMultiply(FusedMultiply):
    """How many rows there are decides anew at each call; a graph keeps what its number of rows chose."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, launch: Launch) -> None:
        self._weight = weight
        self._bias = bias
        self._pdl = launch.pdl
        self._matvec_config = launch.config(
            "matvec", (weight.shape[0], weight.shape[1]), MatvecConfig(), weight
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return self._one_row(x)
        return linear(x, self._weight, self._bias)

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
        return silu_and_mul(linear(x, self._weight, self._bias), pdl=self._pdl)

    def _one_row(
        self, x: torch.Tensor, norm: NormBefore | None = None, is_gated: bool = False
    ) -> torch.Tensor:
        return matvec(
            x,
            self._weight,
            norm=norm,
            bias=self._bias,
            gated=is_gated,
            config=self._matvec_config,
            pdl=self._pdl,
        )
