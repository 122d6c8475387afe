"""Products of few rows by Triton kernels, and of more by torch's library, with norm and gate along."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from inferplane_kernels_triton.block_scale import WeightScale
from inferplane_kernels_triton.matvec import NormBefore, matvec
from inferplane_kernels_triton.skinny_matmul import skinny_matmul
from inferplane_torch_accelerator.fused_product import FusedProduct
from inferplane_torch_accelerator.launch import Launch
from inferplane_torch_accelerator.products import (
    MANY_ROWS,
    add_in_parts,
    for_few_rows,
    for_many_rows,
    for_one_row,
    multiply_in_parts,
    rounded_up,
)


class WeightProduct(FusedProduct):
    """``weight: [out, in]`` in any type that the kernel of one row reads, with a scale where it has one."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        launch: Launch,
        scale: WeightScale = None,
    ) -> None:
        super().__init__(bias, pdl=launch.pdl(weight.device))
        self._weight = weight
        self._scale = scale
        self._for_one_row = [for_one_row(weight, launch, is_gated=gated) for gated in (False, True)]

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
            config=self._for_one_row[is_gated],
            pdl=self._pdl,
        )


class DenseMultiply(WeightProduct):
    """A plain weight. Up to 64 rows go to a Triton kernel where that was measured to beat the library."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, launch: Launch) -> None:
        super().__init__(weight, bias, launch)
        self._for_few_rows = [for_few_rows(weight, launch, is_gated=gated) for gated in (False, True)]
        self._for_many_rows = for_many_rows(weight, launch)

    def _more_rows(self, x: torch.Tensor) -> torch.Tensor:
        y = self._few_rows(x, is_gated=False)
        return self._by_library(x) if y is None else y

    def _more_rows_gated(self, x: torch.Tensor) -> torch.Tensor:
        y = self._few_rows(x, is_gated=True)
        return super()._more_rows_gated(x) if y is None else y

    def _few_rows(self, x: torch.Tensor, *, is_gated: bool) -> torch.Tensor | None:
        """None for numbers of rows that the library multiplies faster."""
        choice = self._for_few_rows[is_gated].get(rounded_up(x.shape[0]))
        if choice is None:
            return None
        return skinny_matmul(
            x,
            self._weight,
            bias=self._bias,
            gated=is_gated,
            workspace=choice.workspace,
            config=choice.config,
            pdl=self._pdl,
        )

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """The library adds while it writes products of many rows, which spares the norm to read and write the sum."""
        if x.shape[0] < MANY_ROWS or self._bias is not None:
            return None
        return add_in_parts(residual, x, self._weight, self._for_many_rows)

    def _by_library(self, x: torch.Tensor) -> torch.Tensor:
        if self._for_many_rows is not None and x.shape[0] >= MANY_ROWS:
            return multiply_in_parts(x, self._weight, self._bias, self._for_many_rows)
        return linear(x, self._weight, self._bias)
