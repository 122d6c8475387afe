"""The kernel for plain weights."""

from __future__ import annotations

from typing import ClassVar

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import LinearKernel, LinearShape, Multiply
from inferplane_torch_accelerator.launch import Launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class DenseLinear(LinearKernel):
    """Plain weights. One row takes as long as reading the weight, so that norm and gate come along for nothing.

    A platform gives it a name and says how kernels are launched.
    """

    launch: ClassVar[Launch]
    priority = 10

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        if shape.dtype not in DTYPES:
            return f"multiplies bfloat16, float16 and float32, not {shape.dtype}"
        return cls.launch.why_not()

    @classmethod
    def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
        from inferplane_torch_accelerator.dense_multiply import DenseMultiply

        return DenseMultiply(weight, bias, cls.launch)
