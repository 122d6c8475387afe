"""The kernel for weights of up to four bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from inferplane.api.act_order import Reordered, by_group
from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import LinearShape, Multiply
from inferplane.api.quant import Number, QuantizedLinearKernel, QuantizedWeight, QuantScheme
from inferplane_torch_accelerator.launch import Launch

if TYPE_CHECKING:
    from inferplane_kernels_triton.int4_matrix import Int4Matrix

DTYPES = (torch.bfloat16, torch.float16)
_ONLY = "multiplies whole numbers of up to 4 bits and E2M1 only"


def _is_four_bits(scheme: QuantScheme) -> bool:
    return scheme.number is Number.FP4 or (scheme.number is Number.INT and scheme.bits <= 4)


def four_bits_reason(scheme: QuantScheme) -> str | None:
    """Why no `Int4Matrix` has weights of the scheme. Needs the kernels' library."""
    from inferplane_kernels_triton.int4_matrix import unsupported_group

    return unsupported_group(scheme.granularity.columns) if _is_four_bits(scheme) else _ONLY


def int4_matrix(weight: QuantizedWeight) -> Int4Matrix:
    """As the kernels read it; ``weight`` has scales by row and group, and columns in the groups' order."""
    from inferplane_kernels_triton.int4_matrix import Int4Matrix

    return Int4Matrix.pack(
        weight.codes,
        weight.scale,
        weight.in_features,
        weight.scheme.granularity.columns,
        weight.zero,
        weight.offset,
        is_e2m1=weight.scheme.number is Number.FP4,
    )


class Int4Linear(QuantizedLinearKernel):
    """Whole numbers of up to 4 bits, and E2M1, with scales by channel or group: GPTQ, AWQ, compressed-tensors, GGUF,
    MXFP4, NVFP4, and what is rounded while it is loaded. Activations stay as they are.

    A platform gives it a name and says how kernels are launched.
    """

    launch: ClassVar[Launch]
    priority = 10

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        if shape.scheme is None or not _is_four_bits(shape.scheme):
            return _ONLY
        if shape.dtype not in DTYPES:
            return f"multiplies bfloat16 and float16 activations, not {shape.dtype}"
        return cls.launch.why_not() or four_bits_reason(shape.scheme)

    @classmethod
    def prepare(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> Multiply:
        from inferplane_torch_accelerator.int4_multiply import Int4Multiply

        weight = weight.by_row()
        if weight.column_group is None:
            return Int4Multiply(weight, bias, cls.launch)
        ordered, order = by_group(weight)
        return Reordered(Int4Multiply(ordered, bias, cls.launch), order, weight.in_features)
