"""Quantized weights by the kernels of `inferplane_kernels_cpu.quantized`."""

from __future__ import annotations

from typing import ClassVar

import torch

from inferplane.api.act_order import Reordered, by_group
from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import FusedMultiply, LinearShape, Multiply, RowProduct
from inferplane.api.quant import Number, QuantizedLinearKernel, QuantizedWeight
from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native_linear import NativeLinear
from inferplane_kernels_cpu.quantized import QuantizedProduct

_LEAST_GROUP, _WIDE_GROUP = 16, 32
_MOST_PADDING = 1.5
"""Columns for each one that there is, up to which a rank's part of a matrix with act-order is worth packing."""


class CpuQuantizedLinear(QuantizedLinearKernel):
    """Whole numbers of up to 8 bits with scales by channel or group: GGUF, GPTQ, AWQ, and the integer schemes of
    compressed-tensors and torchao. Activations are float32, and multiplied in 16-bit fixed point."""

    name = "cpu_quantized"
    priority = 10
    gives_rows = True
    activation_bits = 16
    activations: ClassVar[torch.dtype] = torch.float32

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        scheme = shape.scheme
        assert scheme is not None
        if reason := native.unavailable_reason():
            return reason
        if shape.dtype != cls.activations:
            return f"multiplies {cls.activations} activations, not {shape.dtype}"
        if scheme.number is not Number.INT:
            return f"multiplies whole numbers, not {scheme.number.value}"
        group = scheme.granularity.columns
        if group is not None and group % _LEAST_GROUP:
            return f"groups should be a multiple of {_LEAST_GROUP} columns, not {group}"
        if scheme.has_column_order and shape.needs_rows:
            return "gives out no rows of a matrix with act-order"
        return None

    @classmethod
    def prepare(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> Multiply:
        weight = weight.by_row()
        if weight.column_group is None:
            return CpuQuantizedProduct(_pack(weight, bias), cls.activations)
        ordered, order = by_group(weight)
        if ordered.in_features > _MOST_PADDING * weight.in_features:  # too few of each group on this rank
            return NativeLinear(weight.dequantize(cls.activations), bias)
        return Reordered(_pack(ordered, bias), order, weight.in_features)


class CpuQuantizedBf16Linear(CpuQuantizedLinear):
    """The same of bfloat16 activations."""

    name = "cpu_quantized_bf16"
    activations = torch.bfloat16


class CpuQuantizedProduct(RowProduct, FusedMultiply):
    def __init__(self, product: QuantizedProduct, activations: torch.dtype) -> None:
        self._product = product
        self._activations = activations

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)

    def after_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        is_gated: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._product.after_add_rms_norm(x, residual, weight, eps, is_gated=is_gated)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return self._product.silu_and_mul(x)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self._product.rows(index, self._activations)


def _pack(weight: QuantizedWeight, bias: torch.Tensor | None) -> QuantizedProduct:
    is_packed = weight.scheme.is_packed
    zero, minimum = (8 if is_packed else 128), weight.offset
    if weight.zero is not None:
        if not weight.zero.is_floating_point() and bool((weight.zero == weight.zero[0, 0]).all()):
            zero += int(weight.zero[0, 0])
        else:
            # exact for whole numbers and scales of half precision: a product of 8 by 11 bits
            below = -(weight.zero.float() * weight.scale.float())
            minimum = below if minimum is None else minimum + below
    return QuantizedProduct(
        weight.codes if is_packed else weight.codes.view(torch.uint8) ^ 128,
        weight.scale,
        minimum,
        bias,
        in_features=weight.in_features,
        bits=4 if is_packed else 8,
        zero=zero,
        group=weight.scheme.granularity.columns or -(-weight.in_features // _WIDE_GROUP) * _WIDE_GROUP,
    )


QUANTIZED_KERNELS: list[type[QuantizedLinearKernel]] = [CpuQuantizedLinear, CpuQuantizedBf16Linear]
