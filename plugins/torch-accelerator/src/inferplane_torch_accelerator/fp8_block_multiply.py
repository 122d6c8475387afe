"""Products by an fp8 weight with a scale for each block: rows rounded by groups of columns, a single one as it is."""

from __future__ import annotations

import torch

from inferplane_kernels_triton.activation import silu_and_mul
from inferplane_kernels_triton.block_matmul import block_matmul
from inferplane_kernels_triton.block_scale import BlockScale
from inferplane_kernels_triton.skinny_matmul import MAX_TOKENS, padded_tokens, skinny_matmul
from inferplane_torch_accelerator.launch import Launch
from inferplane_torch_accelerator.products import few_rows_by_block, many_rows_by_block, rounded_up
from inferplane_torch_accelerator.rounded_product import RoundedProduct

_FEW = (16, 32, 64)
_MANY = tuple(2**power for power in range(MAX_TOKENS.bit_length(), 14))
"""To which numbers of rows are rounded up; more are multiplied as the last."""


class Fp8BlockMultiply(RoundedProduct):
    """``weight: [out, in]`` float8_e4m3fn."""

    by_group = True

    def __init__(
        self, weight: torch.Tensor, scale: BlockScale, bias: torch.Tensor | None, launch: Launch
    ) -> None:
        super().__init__(weight, bias, launch, scale)
        self._blocks = scale
        self._for_one_row = [
            launch.config(f"{kernel}_fp8_block", tuple(weight.shape), config, weight)
            for kernel, config in zip(("matvec", "matvec_gated"), self._for_one_row)
        ]
        self._for_few_rows = [
            {width: few_rows_by_block(weight, width, launch, is_gated=gated) for width in _FEW}
            for gated in (False, True)
        ]
        self._for_many_rows = {rows: many_rows_by_block(weight, rows, launch) for rows in _MANY}

    def _multiply(
        self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, is_gated: bool
    ) -> torch.Tensor:
        if len(codes) <= MAX_TOKENS:
            choice = self._for_few_rows[is_gated][padded_tokens(len(codes))]
            return skinny_matmul(
                codes,
                self._weight,
                x_scale=scale,
                weight_scale=self._blocks,
                bias=self._bias,
                gated=is_gated,
                out_dtype=dtype,
                workspace=choice.workspace,
                config=choice.config,
                pdl=self._pdl,
            )
        product = block_matmul(
            codes,
            scale,
            self._weight,
            self._blocks,
            bias=self._bias,
            out_dtype=dtype,
            config=self._for_many_rows[min(rounded_up(len(codes)), _MANY[-1])],
            pdl=self._pdl,
        )
        return silu_and_mul(product, pdl=self._pdl) if is_gated else product
