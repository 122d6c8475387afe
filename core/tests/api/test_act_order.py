"""Columns in any order against the same numbers by their groups of neighbours."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from inferplane.api.act_order import Reordered, by_group
from inferplane.api.quant import Granularity, Number, QuantizedWeight, QuantScheme
from inferplane.api.quantized_weight import pack_nibbles

SIZE = 32


def weight_of(groups: torch.Tensor, num_groups: int, bits: int, columns: int | None) -> QuantizedWeight:
    """With zero points and offsets, and scales that multiply codes to whole numbers."""
    rows, half = 6, 2 ** (bits - 1)
    codes = torch.randint(-half, half, (rows, len(groups)))
    scheme = QuantScheme(
        Number.INT, bits, Granularity(1, columns), torch.float32, is_symmetric=False, has_offset=True,
        has_column_order=True,
    )  # fmt: skip
    return QuantizedWeight(
        scheme,
        rows,
        len(groups),
        pack_nibbles(codes + 8) if bits <= 4 else codes.to(torch.int8),
        torch.randint(1, 9, (rows, num_groups)).float(),
        torch.randint(-half, half, (rows, num_groups)).to(torch.int8),
        groups.int(),
        offset=torch.randint(-9, 9, (rows, num_groups)).float(),
    )


def check(weight: QuantizedWeight) -> QuantizedWeight:
    ordered, order = by_group(weight)
    want, found = weight.dequantize(torch.float32), ordered.dequantize(torch.float32)
    is_column = order < weight.in_features
    assert sorted(order[is_column].tolist()) == list(range(weight.in_features))
    assert torch.equal(found[:, is_column], want[:, order[is_column]])

    x = torch.randint(-9, 9, (3, weight.in_features)).float()
    product = Reordered(lambda each: each @ found.T, order, weight.in_features)
    assert torch.equal(product(x), x @ want.T)
    return ordered


@given(st.sampled_from([3, 4, 8]), st.lists(st.integers(0, 4), min_size=1, max_size=150), st.integers(0, 99))
def test_whatever_there_is_of_each_group(bits: int, groups: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    check(weight_of(torch.tensor(groups), 5, bits, SIZE))


def test_whole_groups_stay_whole() -> None:
    """And the last may be cut short."""
    for columns in (5 * SIZE, 5 * SIZE - 7):
        groups = (torch.arange(columns) // SIZE)[torch.randperm(columns)]
        ordered = check(weight_of(groups, 5, 4, SIZE))
        assert ordered.in_features == columns
        assert ordered.scheme.granularity == Granularity(1, SIZE) and not ordered.scheme.has_column_order


def test_a_group_of_all_columns() -> None:
    assert check(weight_of(torch.zeros(40), 1, 8, None)).scheme.granularity == Granularity(1, None)
