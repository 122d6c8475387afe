"""Products by an fp8 weight: one row as it is, more with each row rounded to fp8 by a scale of its own."""

from __future__ import annotations

import torch

from inferplane_kernels_triton.quantize import quantize_per_token
from inferplane_torch_accelerator.dense_multiply import FusedProduct
from inferplane_torch_accelerator.launch import Launch


class Fp8Multiply(FusedProduct):
    """``weight: [out, in]`` float8_e4m3fn and ``scale: [out]`` float32."""

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, launch: Launch
    ) -> None:
        super().__init__(weight, bias, launch, scale)
        self._columns = weight.T
        self._column_scale = scale.unsqueeze(0)

    def _more_rows(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = quantize_per_token(x, pdl=self._pdl)
        product = torch._scaled_mm(
            codes,
            self._columns,
            scale_a=scale,
            scale_b=self._column_scale,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return product if self._bias is None else product.add_(self._bias)
