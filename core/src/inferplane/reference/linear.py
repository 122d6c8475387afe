"""The reference way to multiply by a weight."""

from __future__ import annotations

from functools import partial

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import LinearKernel, LinearShape, Multiply


class ReferenceLinear(LinearKernel):
    """torch's own product with the weight as it was loaded."""

    name = "reference"
    priority = -1000

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        if not shape.dtype.is_floating_point:
            return f"multiplies float weights only, not {shape.dtype}"
        return None

    @classmethod
    def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
        return partial(torch.nn.functional.linear, weight=weight, bias=bias)
