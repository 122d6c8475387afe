"""Weights whose columns belong to groups in any order (act-order), brought to groups of neighbours. Imports torch."""

from __future__ import annotations

from dataclasses import replace

import torch

from inferplane.api.linear import Multiply
from inferplane.api.quantized_weight import Granularity, Number, QuantizedWeight, pack_nibbles

_PIECE = 16
"""Columns of a group that no kernel takes for too small."""


def by_group(weight: QuantizedWeight) -> tuple[QuantizedWeight, torch.Tensor]:
    """The same whole numbers one group after another, and which of ``weight``'s columns each of the new ones was.

    A rank's part of such a matrix may hold a few columns of each group. Groups are then in pieces of 16 columns, and
    what is missing of the last piece is a column that is none: ``in_features``, one beyond the last.
    """
    assert weight.column_group is not None and weight.scheme.number is Number.INT
    granularity = weight.scheme.granularity
    size = granularity.columns or weight.in_features
    num_groups = weight.scale.shape[1]
    counts = torch.bincount(weight.column_group, minlength=num_groups)
    order = torch.argsort(weight.column_group, stable=True)
    groups = None
    if not ((counts[:-1] == size).all() and counts[-1] <= size):
        granularity, pieces = Granularity(1, _PIECE), -(-counts // _PIECE)
        groups = torch.arange(num_groups, device=order.device).repeat_interleave(pieces)
        of_column = weight.column_group[order].long()
        first, first_new = counts.cumsum(0) - counts, (pieces.cumsum(0) - pieces) * _PIECE
        targets = first_new[of_column] + torch.arange(len(order), device=order.device) - first[of_column]
        order = torch.full_like(groups.repeat_interleave(_PIECE), weight.in_features).index_copy(
            0, targets, order
        )

    def of_groups(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor if tensor is None or groups is None else tensor[:, groups]

    codes = torch.nn.functional.pad(weight.unpacked(), (0, 1))[:, order]
    ordered = replace(
        weight,
        scheme=replace(weight.scheme, granularity=granularity, has_column_order=False),
        in_features=len(order),
        codes=pack_nibbles(codes + 8) if weight.scheme.is_packed else codes,
        scale=of_groups(weight.scale),
        zero=of_groups(weight.zero),
        offset=of_groups(weight.offset),
        column_group=None,
    )
    return ordered, order


class Reordered:
    """A product by a matrix that `by_group` made: activations follow its columns."""

    def __init__(self, multiply: Multiply, order: torch.Tensor, in_features: int) -> None:
        self._multiply = multiply
        self._order = order
        self._has_gaps = len(order) != in_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._has_gaps:
            x = torch.nn.functional.pad(x, (0, 1))
        return self._multiply(x.index_select(1, self._order))
