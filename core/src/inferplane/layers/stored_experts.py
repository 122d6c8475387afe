"""The quantized matrices of a layer's experts: what they are as two products, if they can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from inferplane.api.quantized_weight import Granularity, Number, QuantizedWeight, QuantScheme, stack
from inferplane.layers.parallel import Share
from inferplane.layers.stored import KeptMatrix


@dataclass(frozen=True)
class StoredPart:
    """A stored matrix, of one expert or of all."""

    kept: KeptMatrix
    is_down: bool
    take: Callable[[QuantizedWeight], QuantizedWeight]
    """This rank's part of the whole matrix, its rows in the product's order."""
    copy: Callable[[torch.Tensor], None]
    """Puts this rank's part of the whole matrix, dequantized, to where plain weights are."""


def scheme_of_all(scheme: QuantScheme, out_features: int) -> QuantScheme | None:
    """Of one product of matrices that have ``scheme`` each, where no block of a scale may have rows of two matrices of
    ``out_features``. None where they may be no one product: each may have an order of columns or a table of its own.
    """
    if scheme.has_column_order or scheme.number is Number.TABLE4:
        return None
    rows, columns = scheme.granularity.rows, scheme.granularity.columns
    is_whole = rows is not None and out_features % rows == 0
    return scheme if is_whole else replace(scheme, granularity=Granularity(1, columns))


def cuts_a_group(scheme: QuantScheme, columns: Share) -> bool:
    """Whether a rank's columns have a part of what one scale is for."""
    size, stop = scheme.granularity.columns, columns.start + columns.size
    return size is not None and bool(columns.start % size or (stop % size and stop != columns.total))


def owned(weight: QuantizedWeight) -> QuantizedWeight:
    """Without the memory of the whole matrix that it may be a part of."""
    tensors = {name: getattr(weight, name) for name in ("codes", "scale", "zero", "offset")}
    parts = {name: each for name, each in tensors.items() if each is not None and _is_part(each)}
    return replace(weight, **{name: each.clone() for name, each in parts.items()})


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def joined(weights: Sequence[QuantizedWeight], scheme: QuantScheme, name: str) -> QuantizedWeight:
    """One below another, with the scheme that `scheme_of_all` found."""
    if scheme != weights[0].scheme:
        weights = [weight.by_row() for weight in weights]
    return stack(weights, [name] * len(weights))
