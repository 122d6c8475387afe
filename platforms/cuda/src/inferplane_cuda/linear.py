"""Products by weights: a Triton kernel for a single row, torch's library for more."""

from __future__ import annotations

import importlib.util

import torch
from torch.nn.functional import linear

from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import FusedMultiply, LinearKernel, LinearShape, Multiply
from inferplane_cuda.launch import DEPENDENT_LAUNCH
from inferplane_kernels_triton.activation import silu_and_mul
from inferplane_kernels_triton.matvec import NormBefore, matvec
from inferplane_kernels_triton.norm import add_rms_norm, rms_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CudaLinear(LinearKernel):
    """Plain weights. One row takes as long as reading the weight, so that norm and gate come along for nothing."""

    name = "cuda_dense"
    priority = 10

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        if shape.dtype not in DTYPES:
            return f"multiplies bfloat16, float16 and float32, not {shape.dtype}"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        return None

    @classmethod
    def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
        return DenseMultiply(weight, bias)


class DenseMultiply(FusedMultiply):
    """How many rows there are decides anew at each call; a graph keeps what its number of rows chose."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return matvec(x, self._weight, bias=self._bias, pdl=DEPENDENT_LAUNCH)
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
            product = matvec(
                x, self._weight, norm=norm, bias=self._bias, gated=is_gated, pdl=DEPENDENT_LAUNCH
            )
            return product, total
        if residual is None:
            normed, total = rms_norm(x, weight, eps, pdl=DEPENDENT_LAUNCH), x
        else:
            normed, total = add_rms_norm(x, residual, weight, eps, pdl=DEPENDENT_LAUNCH)
        return (self.silu_and_mul(normed) if is_gated else self(normed)), total

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return matvec(x, self._weight, bias=self._bias, gated=True, pdl=DEPENDENT_LAUNCH)
        return silu_and_mul(linear(x, self._weight, self._bias), pdl=DEPENDENT_LAUNCH)
