"""The kernel for fp8 weights."""

from __future__ import annotations

from typing import ClassVar

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import LinearShape, Multiply
from inferplane.api.quant import Granularity, Number, QuantizedLinearKernel, QuantizedWeight
from inferplane.api.quantized_weight import Activation
from inferplane_torch_accelerator.launch import Launch

_MULTIPLE = 16
"""Of the sizes that torch's scaled product takes."""


class Fp8Linear(QuantizedLinearKernel):
    """e4m3 weights with one scale, or one for each output; activations are rounded token by token.

    A platform gives it a name and says how kernels are launched.
    """

    launch: ClassVar[Launch]
    needs: ClassVar[str] = "fp8_e4m3_matmul"
    """The capability without which the platform's torch has no scaled product."""
    priority = 10

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        scheme = shape.scheme
        if scheme is None or scheme.number is not Number.FP8_E4M3:
            return "multiplies fp8_e4m3 weights only"
        if scheme.granularity not in (Granularity(None, None), Granularity(1, None)):
            return f"takes one scale, or one for each output, not {scheme.granularity}"
        if scheme.activation in (Activation.NONE, Activation.DYNAMIC_GROUP):
            return f"rounds activations token by token, which the weight's format ({scheme}) does not allow"
        if shape.dtype != torch.bfloat16:
            return f"torch's scaled product makes bfloat16, not {shape.dtype}"
        if shape.in_features % _MULTIPLE or shape.out_features % _MULTIPLE:
            return f"takes multiples of {_MULTIPLE}, not {shape.in_features} → {shape.out_features}"
        if not device.capabilities.has(cls.needs):
            return f"the device has no {cls.needs}"
        return cls.launch.why_not()

    @classmethod
    def prepare(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> Multiply:
        from inferplane_torch_accelerator.fp8_multiply import Fp8Multiply

        by_row = weight.by_row()
        return Fp8Multiply(by_row.codes, by_row.scale.float().flatten().contiguous(), bias, cls.launch)
