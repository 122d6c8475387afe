"""The kernels for the quantized experts of a mixture."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.quant import Number, QuantizedWeight, QuantScheme
from inferplane.api.quantized_experts import ExpertsShape, MultiplyExperts, QuantizedExpertsKernel
from inferplane_torch_accelerator.fp8_linear import Fp8Linear
from inferplane_torch_accelerator.int4_linear import DTYPES as HALF_DTYPES
from inferplane_torch_accelerator.int4_linear import four_bits_reason, int4_matrix
from inferplane_torch_accelerator.launch import Launch
from inferplane_torch_accelerator.linear import DTYPES

if TYPE_CHECKING:
    from inferplane_kernels_triton.int4_matrix import Int4Matrix
    from inferplane_kernels_triton.moe_codes import ExpertCodes

_PIECE = 16
"""Columns of a scale are so many, or a multiple."""


class _TritonExperts(QuantizedExpertsKernel):
    """Weights become numbers of the activations' type as they are loaded, so that activations stay as they are.

    A platform gives it a name and says how kernels are launched.
    """

    launch: ClassVar[Launch]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    """Of activations."""
    priority = 10

    @classmethod
    def unsupported_reason(cls, shape: ExpertsShape, device: DeviceDescriptor) -> str | None:
        if shape.dtype not in cls.dtypes:
            known = ", ".join(str(each).removeprefix("torch.") for each in cls.dtypes)
            return f"multiplies activations of {known}, not {shape.dtype}"
        # the library is asked before what only it knows
        return cls.launch.why_not() or cls._reason(shape.gate_up) or cls._reason(shape.down)

    @classmethod
    def prepare(
        cls,
        shape: ExpertsShape,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> MultiplyExperts:
        from inferplane_torch_accelerator.experts import tuned_experts

        return partial(
            tuned_experts(cls.launch), w13=cls._packed(gate_up, shape), w2=cls._packed(down, shape),
            w13_bias=gate_up_bias, w2_bias=down_bias, activation=shape.activation, first_expert=shape.first_expert,
            swiglu_alpha=shape.swiglu_alpha, swiglu_limit=shape.swiglu_limit,
        )  # fmt: skip

    @classmethod
    @abstractmethod
    def _reason(cls, scheme: QuantScheme) -> str | None:
        """Why weights of a scheme are not multiplied."""

    @classmethod
    @abstractmethod
    def _packed(cls, weight: QuantizedWeight, shape: ExpertsShape) -> ExpertCodes | Int4Matrix:
        """As the kernels read it."""


class EightBitExperts(_TritonExperts):
    """fp8 and whole numbers of more than four bits, with scales by row, group or block."""

    dtypes = DTYPES

    @classmethod
    def unsupported_reason(cls, shape: ExpertsShape, device: DeviceDescriptor) -> str | None:
        if reason := super().unsupported_reason(shape, device):
            return reason
        has_fp8 = any(scheme.number is not Number.INT for scheme in (shape.gate_up, shape.down))
        if has_fp8 and cls.launch.backend == "nvidia" and not device.capabilities.has(Fp8Linear.needs):
            return f"{device.name} lacks {Fp8Linear.needs}, without which its compiler knows no fp8"
        return None

    @classmethod
    def _reason(cls, scheme: QuantScheme) -> str | None:
        if scheme.is_packed:
            return f"multiplies codes of a byte, not {scheme}"
        if not scheme.is_symmetric or scheme.has_offset:
            return "takes no zero points or offsets"
        columns = scheme.granularity.columns
        if columns is not None and columns % _PIECE:
            return f"takes a scale for a row or a multiple of {_PIECE} columns, not {columns}"
        return None

    @classmethod
    def _packed(cls, weight: QuantizedWeight, shape: ExpertsShape) -> ExpertCodes:
        from inferplane_kernels_triton.moe_codes import ExpertCodes

        granularity = weight.scheme.granularity
        assert granularity.rows is not None
        return ExpertCodes(
            weight.codes.unflatten(0, (shape.num_experts, -1)).contiguous(),
            weight.scale.float().unflatten(0, (shape.num_experts, -1)).contiguous(),
            granularity.rows,
            granularity.columns or weight.in_features,
        )


class FourBitExperts(_TritonExperts):
    """Whole numbers of up to four bits, and E2M1, with scales by row or group."""

    dtypes = HALF_DTYPES

    @classmethod
    def _reason(cls, scheme: QuantScheme) -> str | None:
        return four_bits_reason(scheme)

    @classmethod
    def _packed(cls, weight: QuantizedWeight, shape: ExpertsShape) -> Int4Matrix:
        return int4_matrix(weight.by_row())
