"""Products by an fp8 weight: rows rounded to fp8 by scales of their own, a single one as it is."""

from __future__ import annotations

import torch

from inferplane_kernels_triton.activation import silu_and_mul
from inferplane_kernels_triton.fp8_matvec import MAX_IN, Fp8MatvecConfig, fp8_matvec
from inferplane_kernels_triton.matvec import NormBefore
from inferplane_kernels_triton.skinny_matmul import skinny_matmul
from inferplane_torch_accelerator.launch import Launch
from inferplane_torch_accelerator.products import for_few_rows, rounded_up
from inferplane_torch_accelerator.rounded_product import RoundedProduct


class Fp8Multiply(RoundedProduct):
    """``weight: [out, in]`` float8_e4m3fn and ``scale: [out]`` float32; x is bfloat16.

    Up to 64 rounded rows go to a Triton kernel where that was measured to be faster, more to torch's scaled product.
    """

    by_group = False

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, launch: Launch
    ) -> None:
        super().__init__(weight, bias, launch, scale)
        self._scales = scale
        self._columns, self._row_of_scales = (
            weight.T,
            scale.unsqueeze(0),
        )  # as torch's scaled product takes them
        self._sums_fast = launch.backend == "nvidia"  # torch knows the choice for no other
        self._for_few_rows = [for_few_rows(weight, launch, is_gated=gated) for gated in (False, True)]
        self._fp8_matvec = [fp8_row_config(weight, launch, is_gated=gated) for gated in (False, True)]

    def _one_row(
        self, x: torch.Tensor, norm: NormBefore | None = None, is_gated: bool = False
    ) -> torch.Tensor:
        config = self._fp8_matvec[is_gated]
        if config is None or x.storage_offset() % 4 or x.stride(0) % 4:  # it is read four numbers at a time
            return super()._one_row(x, norm, is_gated)
        return fp8_matvec(
            x,
            self._weight,
            self._scales,
            norm=norm,
            bias=self._bias,
            gated=is_gated,
            config=config,
            pdl=self._pdl,
        )

    def _multiply(
        self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, is_gated: bool
    ) -> torch.Tensor:
        choice = self._for_few_rows[is_gated].get(rounded_up(codes.shape[0]))
        if choice is not None:
            return skinny_matmul(
                codes,
                self._weight,
                x_scale=scale,
                weight_scale=self._scales,
                bias=self._bias,
                gated=is_gated,
                out_dtype=dtype,
                workspace=choice.workspace,
                config=choice.config,
                pdl=self._pdl,
            )
        product = torch._scaled_mm(
            codes,
            self._columns,
            scale_a=scale,
            scale_b=self._row_of_scales,
            out_dtype=dtype,
            use_fast_accum=self._sums_fast,
        )
        if self._bias is not None:
            product.add_(self._bias)
        return silu_and_mul(product, pdl=self._pdl) if is_gated else product


def fp8_row_config(weight: torch.Tensor, launch: Launch, *, is_gated: bool) -> Fp8MatvecConfig | None:
    """None where a single row is `matvec`'s: on devices whose instructions `fp8_matvec` is not written in."""
    if launch.backend != "nvidia" or weight.shape[1] > MAX_IN:
        return None
    kernel = "fp8_matvec_gated" if is_gated else "fp8_matvec"
    return launch.config(kernel, tuple(weight.shape), Fp8MatvecConfig(), weight)
