"""The kernels for the quantized experts of a mixture."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.quant import QuantizedWeight, QuantScheme
from inferplane.api.quantized_experts import ExpertsShape, MultiplyExperts, QuantizedExpertsKernel
from inferplane_torch_accelerator.launch import Launch
from inferplane_torch_accelerator.linear import DTYPES

_PIECE = 16
"""Columns of a scale are so many, or a multiple."""


class EightBitExperts(QuantizedExpertsKernel):
    """fp8 and whole numbers of more than four bits, with scales by row, group or block. They become numbers of the
    activations' type as they are loaded, so that activations stay as they are.

    A platform gives it a name and says how kernels are launched.
    """

    launch: ClassVar[Launch]
    priority = 10

    @classmethod
    def unsupported_reason(cls, shape: ExpertsShape, device: DeviceDescriptor) -> str | None:
        if shape.dtype not in DTYPES:
            return f"multiplies bfloat16, float16 and float32 activations, not {shape.dtype}"
        return _reason(shape.gate_up) or _reason(shape.down) or cls.launch.why_not()

    @classmethod
    def prepare(
        cls,
        shape: ExpertsShape,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> MultiplyExperts:
        from inferplane_kernels_triton.moe_codes import ExpertCodes
        from inferplane_torch_accelerator.experts import tuned_experts

        def coded(weight: QuantizedWeight) -> ExpertCodes:
            granularity = weight.scheme.granularity
            assert granularity.rows is not None
            return ExpertCodes(
                weight.codes.unflatten(0, (shape.num_experts, -1)).contiguous(),
                weight.scale.float().unflatten(0, (shape.num_experts, -1)).contiguous(),
                granularity.rows,
                granularity.columns or weight.in_features,
            )

        return partial(
            tuned_experts(cls.launch), w13=coded(gate_up), w2=coded(down), w13_bias=gate_up_bias, w2_bias=down_bias,
            activation=shape.activation, first_expert=shape.first_expert, swiglu_alpha=shape.swiglu_alpha,
            swiglu_limit=shape.swiglu_limit,
        )  # fmt: skip


def _reason(scheme: QuantScheme) -> str | None:
    if scheme.is_packed:
        return f"multiplies codes of a byte, not {scheme}"
    if not scheme.is_symmetric or scheme.has_offset:
        return "takes no zero points or offsets"
    columns = scheme.granularity.columns
    if columns is not None and columns % _PIECE:
        return f"takes a scale for a row or a multiple of {_PIECE} columns, not {columns}"
    return None
