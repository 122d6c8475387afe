"""Who multiplies the quantized experts of a mixture. Imports torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.quantized_weight import QuantizedWeight, QuantScheme

MultiplyExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``x: [num_tokens, hidden_size]``, ``topk_weights: [num_tokens, top_k]`` float32 and ``topk_ids: [num_tokens, top_k]``
int32 to ``[num_tokens, hidden_size]``, as the op ``fused_experts`` of the dequantized weights. None is changed."""


@dataclass(frozen=True)
class ExpertsShape:
    """The experts of one layer on this rank, before they are packed, and what the op ``fused_experts`` is told."""

    name: str
    num_experts: int
    first_expert: int
    """An id below it, or of ``first_expert + num_experts`` and more, adds nothing."""
    hidden_size: int
    intermediate_size: int
    """Of each expert, as far as this rank has it."""
    dtype: torch.dtype
    """The activations'."""
    activation: str
    """One of `inferplane.api.ops.EXPERT_ACTIVATIONS`."""
    swiglu_alpha: float
    swiglu_limit: float
    has_bias: bool
    gate_up: QuantScheme
    down: QuantScheme
    """Neither has an order of columns or a table of its own: such experts are dequantized."""


class QuantizedExpertsKernel(ABC):
    """Packs the quantized experts of a layer once at load and multiplies by them ever after."""

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    """Among kernels that support a shape the highest wins."""

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, shape: ExpertsShape, device: DeviceDescriptor) -> str | None: ...

    @classmethod
    @abstractmethod
    def prepare(
        cls,
        shape: ExpertsShape,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> MultiplyExperts:
        """Experts lie one below another in ``gate_up: [num_experts * 2 * intermediate_size, hidden_size]``, of each the
        gate's rows first, and ``down: [num_experts * hidden_size, intermediate_size]``, on the device. Their schemes
        are the shape's, but for scales by the row where a block's rows would not end with a matrix.

        ``gate_up_bias: [num_experts, 2 * intermediate_size]``, ``down_bias: [num_experts, hidden_size]``: the second is
        None on ranks that do not add it.
        """
