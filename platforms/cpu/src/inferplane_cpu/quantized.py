"""Quantized weights by the kernels of `inferplane_kernels_cpu.quantized`."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import FusedMultiply, LinearShape, Multiply, RowProduct
from inferplane.api.quant import Number, QuantizedLinearKernel, QuantizedWeight
from inferplane.api.quantized_weight import pack_nibbles
from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native_linear import NativeLinear
from inferplane_kernels_cpu.quantized import QuantizedProduct

_LEAST_GROUP, _WIDE_GROUP = 16, 32


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
        order = torch.argsort(weight.column_group, stable=True)
        if not _has_even_groups(
            weight
        ):  # a rank's part of such a matrix may hold a few columns of each group
            return NativeLinear(weight.dequantize(cls.activations), bias)
        return _Reordered(_pack(_in_order(weight, order), bias), order)


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


class _Reordered:
    """Columns lie group by group; activations follow them."""

    def __init__(self, product: QuantizedProduct, order: torch.Tensor) -> None:
        self._product = product
        self._order = order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x.index_select(1, self._order))


def _has_even_groups(weight: QuantizedWeight) -> bool:
    """Whether each group but the last has as many columns as the scheme says."""
    assert weight.column_group is not None
    size = weight.scheme.granularity.columns or weight.in_features
    counts = torch.bincount(weight.column_group, minlength=weight.scale.shape[1])
    return bool((counts[:-1] == size).all() and counts[-1] <= size)


def _in_order(weight: QuantizedWeight, order: torch.Tensor) -> QuantizedWeight:
    """The same columns one group after another."""
    codes = weight.unpacked()[:, order]
    if weight.scheme.is_packed:
        codes = pack_nibbles(codes + 8)
    return replace(weight, codes=codes, column_group=None)


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
