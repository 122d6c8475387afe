"""Who multiplies a weight. A checkpoint format says what the numbers mean; a kernel says what it can multiply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from inferplane.api.device import DeviceDescriptor

Multiply = Callable[["torch.Tensor"], "torch.Tensor"]
"""``[num_tokens, in_features] -> [num_tokens, out_features]``, same dtype, bias included."""


@dataclass(frozen=True)
class LinearShape:
    """One weight on this rank, before it is packed."""

    name: str
    in_features: int
    out_features: int
    dtype: torch.dtype
    has_bias: bool


class LinearKernel(ABC):
    """Packs a weight once at load and multiplies by it ever after."""

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    """Among kernels that support a shape the highest wins."""

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None: ...

    @classmethod
    @abstractmethod
    def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
        """``weight: [out_features, in_features]`` and ``bias: [out_features]``, on the device.

        The returned function owns whatever it needs; the layer keeps neither tensor, so that a packed weight does
        not cost its memory twice. The weight may be shared with an embedding and must not be changed.
        """
