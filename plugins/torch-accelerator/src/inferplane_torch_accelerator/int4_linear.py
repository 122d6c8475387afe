"""The kernel for weights of up to four bits."""

from __future__ import annotations

from typing import ClassVar

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import LinearShape, Multiply
from inferplane.api.quant import Number, QuantizedLinearKernel, QuantizedWeight
from inferplane_torch_accelerator.act_order import Reordered, by_group
from inferplane_torch_accelerator.launch import Launch

DTYPES = (torch.bfloat16, torch.float16)


class Int4Linear(QuantizedLinearKernel):
    """Whole numbers of up to 4 bits, and E2M1, with scales by channel or group: GPTQ, AWQ, compressed-tensors, GGUF,
    MXFP4, NVFP4, and what is rounded while it is loaded. Activations stay as they are.

    A platform gives it a name and says how kernels are launched.
    """

    launch: ClassVar[Launch]
    priority = 10

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        scheme = shape.scheme
        is_whole = scheme is not None and scheme.number is Number.INT and scheme.bits <= 4
        if scheme is None or not (is_whole or scheme.number is Number.FP4):
            return "multiplies whole numbers of up to 4 bits and E2M1 only"
        if shape.dtype not in DTYPES:
            return f"multiplies bfloat16 and float16 activations, not {shape.dtype}"
        if reason := cls.launch.why_not():
            return reason
        from inferplane_kernels_triton.int4_matrix import unsupported_group

        return unsupported_group(scheme.granularity.columns)

    @classmethod
    def prepare(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> Multiply:
        from inferplane_torch_accelerator.int4_multiply import Int4Multiply

        weight = weight.by_row()
        if weight.column_group is None:
            return Int4Multiply(weight, bias, cls.launch)
        ordered, order = by_group(weight)
        return Reordered(Int4Multiply(ordered, bias, cls.launch), order, weight.in_features)
