"""What a quantized weight is, who can multiply it, and how a checkpoint stores it. Imports torch.

A format (`QuantFormat`) turns whatever bytes a checkpoint holds into a `QuantizedWeight`, which has one layout for
each kind of number. Kernels (`QuantizedLinearKernel`) see that layout alone and repack it once, so that a kernel serves
every format that reduces to its scheme. What no kernel multiplies is dequantized as it is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import LinearShape, Multiply
from inferplane.api.quantized_weight import Granularity, Number, QuantizedWeight, QuantScheme

__all__ = [
    "PLAIN_DTYPES",
    "Granularity",
    "Number",
    "QuantConfigError",
    "QuantFormat",
    "QuantScheme",
    "QuantizedLinearKernel",
    "QuantizedWeight",
    "StoredMatrix",
    "StoredTensor",
]

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class QuantConfigError(ValueError):
    """A ``quantization_config``, or a matrix in its terms, that means nothing. The message has field and value."""


class QuantizedLinearKernel(ABC):
    """Packs a quantized weight once at load and multiplies by it ever after."""

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    """Among kernels that support a shape the highest wins."""
    gives_rows: ClassVar[bool] = False
    """Whether its products are `RowProduct`s. Only such a kernel is asked about shapes with ``needs_rows``."""
    activation_bits: ClassVar[int | None] = None
    """Bits of the whole numbers that float32 activations are rounded to, by scales of a row or a part of it; None if
    they are multiplied as they are. The conformance kit holds a kernel to float32's rounding unless it says so here."""

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        """``shape.scheme`` is never None here; ``shape.dtype`` is the activations'."""

    @classmethod
    @abstractmethod
    def prepare(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> Multiply:
        """As `LinearKernel.prepare`, of a weight on the device. The product may be a `FusedMultiply`."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a stored matrix."""

    suffix: str
    """What its name has behind the matrix's: ``qweight`` of ``model.layers.0.mlp.up_proj.qweight``."""
    shape: tuple[int | None, ...]
    """None for a size that only the checkpoint knows."""
    dtypes: tuple[torch.dtype, ...]
    """That it may have."""
    is_required: bool = True


class StoredMatrix(ABC):
    """How one matrix ``[out_features, in_features]`` lies in a checkpoint."""

    def __init__(self, name: str, out_features: int, in_features: int) -> None:
        self.name = name
        self.out_features = out_features
        self.in_features = in_features

    @abstractmethod
    def tensors(self) -> Sequence[StoredTensor]: ...

    @abstractmethod
    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        """The whole matrix from its tensors by suffix, all on one device; optional ones may be missing.

        On the meta device values are not there to be looked at. Raises `QuantConfigError`.
        """

    def check_groups(self, columns: int | None) -> None:
        """Raises `QuantConfigError` where a row is no whole number of groups of so many columns; None is all."""
        if columns is not None and self.in_features % columns:
            raise self.fail(f"in_features {self.in_features} are no whole number of groups of {columns}")

    def fail(self, problem: str) -> QuantConfigError:
        return QuantConfigError(f"{self.name} [{self.out_features}, {self.in_features}]: {problem}")


class QuantFormat(ABC):
    """One method of quantization, made from a checkpoint's ``quantization_config`` (empty when it is asked for by
    ``--quantization`` and the checkpoint has none). Raises `QuantConfigError` for a configuration that it cannot read.
    """

    @abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        """Of the linear layer ``name``, before it is split over ranks; None where it is stored plain."""

    def stacked(
        self, name: str, num_matrices: int, out_features: int, in_features: int
    ) -> StoredMatrix | None:
        """Of the experts' tensor ``name``, whose matrices are read as one ``[num * out_features, in_features]``."""
        return None

    def vocabulary(self, name: str, vocab_size: int, size: int) -> StoredMatrix | None:
        """Of the embedding or output head ``name``, which most formats leave plain."""
        return None

    def may_drop(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor that no layer wants says nothing about the model, as a calibration record does not."""
        return False
