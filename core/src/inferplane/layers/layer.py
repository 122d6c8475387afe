"""What all layers have in common: the checkpoint tensors that they take, and how a tree of them is walked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferplane.api.quant import PLAIN_DTYPES


@dataclass(frozen=True)
class WeightSlot:
    """Where one tensor of a checkpoint goes on this rank."""

    name: str
    """As the checkpoint has it."""
    shape: tuple[int | None, ...]
    """In the checkpoint, whatever part of it this rank keeps; None for a size that only the checkpoint knows."""
    copy: Callable[[torch.Tensor], None]
    """Copies this rank's part of the whole tensor into the layer, which converts the dtype on the way."""
    is_required: bool = True
    """False where the layer can do without, as a tied output head can."""
    dtypes: tuple[torch.dtype, ...] = PLAIN_DTYPES
    """That the tensor may have."""


class Layer:
    """A part of a model: built from a `BuildContext`, filled through its slots, then called.

    A plain class and no ``torch.nn.Module``: a decoder calls some ten layers per block for every token, and a
    module's call costs ten times that of a function while its hooks, buffers and parameters go unused here.
    """

    def weight_slots(self) -> Sequence[WeightSlot]:
        """The layer's own, not those of the layers inside it."""
        return ()

    def finish_loading(self) -> None:
        """Called once, when every slot has been filled that the checkpoint has a tensor for."""
        return

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must say what it computes")


def walk_layers(root: object) -> Iterator[Layer]:
    """Every layer that hangs on the attributes of ``root`` (a model or a layer), once each, in the order of making."""
    seen: set[int] = set()

    def visit(value: object) -> Iterator[Layer]:
        inner: Iterable[object] = ()
        if isinstance(value, (list, tuple)):
            inner = value
        elif isinstance(value, dict):
            inner = value.values()
        elif (isinstance(value, (Layer, torch.nn.Module)) or value is root) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Layer):
                yield value
            inner = vars(value).values()
        for each in inner:
            yield from visit(each)

    yield from visit(root)
