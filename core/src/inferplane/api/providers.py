"""What the installed plugins provide, as a worker asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from inferplane.api.attention import AttentionBackend, AttentionQuery
    from inferplane.api.device import DeviceDescriptor
    from inferplane.api.linear import LinearKernel, LinearShape
    from inferplane.api.loading import WeightLoader
    from inferplane.api.ops import OpTable
    from inferplane.api.quant import QuantizedLinearKernel
    from inferplane.api.quantized_experts import ExpertsShape, QuantizedExpertsKernel


class Providers(Protocol):
    """The choices between plugins that a worker needs, and nothing else of the plugin manager.

    Everything that chooses raises an error that lists every candidate with its reason when none can serve.
    """

    def resolve_ops(self, device: DeviceDescriptor, dtype: torch.dtype) -> OpTable:
        """Every declared op once and for all."""
        ...

    def choose_linear(self, shape: LinearShape, device: DeviceDescriptor) -> type[LinearKernel]: ...

    def choose_quantized(
        self, shape: LinearShape, device: DeviceDescriptor
    ) -> type[QuantizedLinearKernel] | None:
        """The kernel for one quantized weight; None where it is to be dequantized."""
        ...

    def choose_experts(
        self, shape: ExpertsShape, device: DeviceDescriptor
    ) -> type[QuantizedExpertsKernel] | None:
        """The kernel for a layer's quantized experts; None where they are to be dequantized."""
        ...

    def quant_formats(self) -> Mapping[str, str]:
        """``"module:Class"`` by ``quant_method``, of plugins."""
        ...

    def choose_attention(self, query: AttentionQuery, name: str | None = None) -> type[AttentionBackend]:
        """The backend for one layer: the one called ``name`` when given, else the best that supports it."""
        ...

    def models(self) -> Mapping[str, str]:
        """``"module:Class"`` by Hugging Face architecture name, of plugins."""
        ...

    def logits_processors(self) -> Mapping[str, str]:
        """``"module:factory"`` by name."""
        ...

    def weight_loader(self, load_format: str) -> WeightLoader:
        """The loader that a plugin brings for a load format."""
        ...
