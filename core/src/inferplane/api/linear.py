"""Who multiplies a weight. A checkpoint format says what the numbers mean; a kernel says what it can multiply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

    from inferplane.api.device import DeviceDescriptor
    from inferplane.api.quantized_weight import QuantScheme

Multiply = Callable[["torch.Tensor"], "torch.Tensor"]
"""``[num_tokens, in_features] -> [num_tokens, out_features]``, same dtype, bias included. The input may lie in any way:
models hand over columns of wider tensors and transposes."""


class FusedMultiply(ABC):
    """A `Multiply` that also does what stands before and after it, where that saves work.

    A layer asks once, when it has its weight, whether it got one. It must be right for any number of rows, and may
    compose where fusing does not pay.
    """

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def after_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        is_gated: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of what the op ``add_rms_norm`` makes of its arguments, and ``x + residual``, or x without one.

        With ``is_gated`` the product goes through the op ``silu_and_mul``. x and residual may be overwritten.
        """

    @abstractmethod
    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """The op ``silu_and_mul`` of the product."""

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """``residual`` and the product of x, where that costs less than to leave the sum to the next norm; else None.

        residual, ``[num_tokens, out_features]``, may be overwritten, but not where the answer is None.
        """
        return None


class RowProduct(ABC):
    """A `Multiply` that also gives out rows of its weight, so that embedding and tied head are one packed weight."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """``index: [n]`` int64 to ``[n, in_features]``, of the activations' dtype."""


@dataclass(frozen=True)
class LinearShape:
    """One weight on this rank, before it is packed."""

    name: str
    in_features: int
    out_features: int
    dtype: torch.dtype
    """Of a plain weight; of a quantized one the activations'."""
    has_bias: bool
    scheme: QuantScheme | None = None
    """None for a plain weight. Others are for a `QuantizedLinearKernel` (`inferplane.api.quant`)."""
    needs_rows: bool = False
    """Whether the weight is an embedding, too, so that the product has to be a `RowProduct`."""


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
        not cost its memory twice. It may be a `FusedMultiply`. The weight may be shared with an embedding and must not
        be changed.
        """
