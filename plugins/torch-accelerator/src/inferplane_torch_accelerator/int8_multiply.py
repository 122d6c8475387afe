"""Products by a weight of eight-bit whole numbers: few rows from the codes, many through half precision."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from inferplane_kernels_triton.skinny_matmul import MAX_TOKENS, skinny_matmul
from inferplane_torch_accelerator.dense_multiply import WeightProduct
from inferplane_torch_accelerator.int4_multiply import space_for
from inferplane_torch_accelerator.launch import Launch


class Int8Multiply(WeightProduct):
    """``weight: [out, in]`` int8 and ``scale: [out]`` float32."""

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, launch: Launch
    ) -> None:
        super().__init__(weight, bias, launch, scale)
        self._space = space_for(weight.numel(), weight.device)

    def _more_rows(self, x: torch.Tensor) -> torch.Tensor:
        return self._few_rows(x, is_gated=False) if len(x) <= MAX_TOKENS else self._by_library(x)

    def _more_rows_gated(self, x: torch.Tensor) -> torch.Tensor:
        return self._few_rows(x, is_gated=True) if len(x) <= MAX_TOKENS else super()._more_rows_gated(x)

    def _few_rows(self, x: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
        return skinny_matmul(
            x, self._weight, weight_scale=self._scale, bias=self._bias, gated=is_gated, pdl=self._pdl
        )

    def _by_library(self, x: torch.Tensor) -> torch.Tensor:
        """The scaled numbers are rounded once, as where a weight is dequantized while it is loaded."""
        assert isinstance(self._scale, torch.Tensor)
        weight = self._space[: self._weight.numel()].view(x.dtype).view(self._weight.shape)
        weight.copy_(self._weight)
        weight.mul_(self._scale.unsqueeze(1))
        return linear(x, weight, self._bias)
