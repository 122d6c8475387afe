"""The kernel for weights of eight-bit whole numbers."""

from __future__ import annotations

from typing import ClassVar

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import LinearShape, Multiply
from inferplane.api.quant import Granularity, Number, QuantizedLinearKernel, QuantizedWeight
from inferplane_torch_accelerator.int4_linear import DTYPES
from inferplane_torch_accelerator.launch import Launch


class Int8Linear(QuantizedLinearKernel):
    """Whole numbers of five to eight bits with one scale, or one for each output. Activations stay as they are, which
    is more exact than formats ask for that round them.

    A platform gives it a name and says how kernels are launched.
    """

    launch: ClassVar[Launch]
    priority = 10

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        scheme = shape.scheme
        if scheme is None or scheme.number is not Number.INT or scheme.is_packed:
            return "multiplies whole numbers of 5 to 8 bits only"
        if scheme.granularity not in (Granularity(None, None), Granularity(1, None)):
            return f"takes one scale, or one for each output, not {scheme.granularity}"
        if not scheme.is_symmetric or scheme.has_offset:
            return "takes no zero points or offsets"
        if shape.dtype not in DTYPES:
            return f"multiplies bfloat16 and float16 activations, not {shape.dtype}"
        return cls.launch.why_not()

    @classmethod
    def prepare(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> Multiply:
        from inferplane_torch_accelerator.int8_multiply import Int8Multiply

        by_row = weight.by_row()
        return Int8Multiply(by_row.codes, by_row.scale.float().flatten().contiguous(), bias, cls.launch)
