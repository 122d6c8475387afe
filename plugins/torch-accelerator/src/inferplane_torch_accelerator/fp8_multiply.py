"""Products by an fp8 weight: one row as it is, more with each row rounded to fp8 by a scale of its own."""

from __future__ import annotations

import torch

from inferplane_kernels_triton.activation import silu_and_mul
from inferplane_kernels_triton.norm import add_rms_norm_in_fp8
from inferplane_kernels_triton.quantize import quantize_per_token
from inferplane_torch_accelerator.dense_multiply import WeightProduct
from inferplane_torch_accelerator.launch import Launch


class Fp8Multiply(WeightProduct):
    """``weight: [out, in]`` float8_e4m3fn and ``scale: [out]`` float32. The norm before several rows rounds."""

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, launch: Launch
    ) -> None:
        super().__init__(weight, bias, launch, scale)
        self._columns = weight.T
        self._column_scale = scale.unsqueeze(0)
        self._sums_fast = launch.backend == "nvidia"  # torch knows the choice for no other

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
        codes, scale, total = add_rms_norm_in_fp8(x, residual, weight, eps, pdl=self._pdl)
        product = self._multiply(codes, scale, x.dtype)
        return (silu_and_mul(product, pdl=self._pdl) if is_gated else product), total

    def _more_rows(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(*quantize_per_token(x, pdl=self._pdl), x.dtype)

    def _multiply(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``codes: [num_tokens, in]`` and ``scale: [num_tokens, 1]`` of `quantize_per_token`."""
        product = torch._scaled_mm(
            codes,
            self._columns,
            scale_a=scale,
            scale_b=self._column_scale,
            out_dtype=dtype,
            use_fast_accum=self._sums_fast,
        )
        return product if self._bias is None else product.add_(self._bias)
