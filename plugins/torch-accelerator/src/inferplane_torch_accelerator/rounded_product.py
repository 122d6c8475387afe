"""What products by an fp8 weight share, whatever its scales: several rows are rounded to fp8, a single one is not."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from inferplane_kernels_triton.norm import add_rms_norm_in_fp8
from inferplane_kernels_triton.quantize import quantize_per_token
from inferplane_torch_accelerator.dense_multiply import WeightProduct


class RoundedProduct(WeightProduct):
    """The norm before several rows rounds them."""

    by_group: ClassVar[bool]
    """Whether each 128 columns of a row have a scale of their own, or all of it one."""

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
            return super().after_add_rms_norm(x, residual, weight, eps, is_gated=is_gated)
        codes, scale, total = add_rms_norm_in_fp8(
            x, residual, weight, eps, by_group=self.by_group, pdl=self._pdl
        )
        return self._multiply(codes, scale, x.dtype, is_gated), total

    def _more_rows(self, x: torch.Tensor) -> torch.Tensor:
        return self._rounded(x, is_gated=False)

    def _more_rows_gated(self, x: torch.Tensor) -> torch.Tensor:
        return self._rounded(x, is_gated=True)

    def _rounded(self, x: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
        codes, scale = quantize_per_token(x, by_group=self.by_group, pdl=self._pdl)
        return self._multiply(codes, scale, x.dtype, is_gated)

    @abstractmethod
    def _multiply(
        self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, is_gated: bool
    ) -> torch.Tensor:
        """``codes: [num_tokens, in]`` and ``scale`` of `quantize_per_token`; through the gate where there is one."""
