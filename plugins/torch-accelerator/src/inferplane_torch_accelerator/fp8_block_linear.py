"""The kernel for fp8 weights with a scale for each block."""

from __future__ import annotations

from typing import ClassVar

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import LinearShape, Multiply
from inferplane.api.quant import Number, QuantizedLinearKernel, QuantizedWeight
from inferplane.api.quantized_weight import Activation
from inferplane_torch_accelerator.fp8_linear import Fp8Linear
from inferplane_torch_accelerator.int4_linear import DTYPES
from inferplane_torch_accelerator.launch import Launch

_COLUMNS = 128
"""Of activations that have one scale; those of a block are so many, or a multiple."""


class Fp8BlockLinear(QuantizedLinearKernel):
    """e4m3 weights with a scale for each block of 128 × 128, or of any rows by a multiple of 128 columns; activations
    are rounded by groups of 128 columns of a token, those of a single token not at all.

    A platform gives it a name and says how kernels are launched.
    """

    launch: ClassVar[Launch]
    priority = 10

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        scheme = shape.scheme
        if scheme is None or scheme.number is not Number.FP8_E4M3:
            return "multiplies fp8_e4m3 weights only"
        rows, columns = scheme.granularity.rows, scheme.granularity.columns
        if rows is None or columns is None or columns % _COLUMNS:
            return (
                f"takes a scale for each block of a multiple of {_COLUMNS} columns, not {scheme.granularity}"
            )
        if scheme.activation is Activation.NONE:
            return f"rounds activations group by group, which the weight's format ({scheme}) does not allow"
        if shape.dtype not in DTYPES:
            return f"multiplies bfloat16 and float16 activations, not {shape.dtype}"
        if not device.capabilities.has(Fp8Linear.needs):
            return f"the device has no {Fp8Linear.needs}"
        return cls.launch.why_not()

    @classmethod
    def prepare(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> Multiply:
        from inferplane_kernels_triton.block_scale import BlockScale
        from inferplane_torch_accelerator.fp8_block_multiply import Fp8BlockMultiply

        rows, columns = weight.scheme.granularity.rows, weight.scheme.granularity.columns
        assert rows is not None and columns is not None
        scale = BlockScale(weight.scale.float().contiguous(), rows, columns)
        return Fp8BlockMultiply(weight.codes, scale, bias, cls.launch)
