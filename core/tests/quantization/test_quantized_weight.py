"""Codes, scales and zero points against arithmetic in float64, and parts of a matrix against parts of its numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferplane.api.quantized_weight import (
    TABLES,
    Granularity,
    Number,
    QuantizedWeight,
    QuantScheme,
    pack_nibbles,
    stack,
)
from inferplane.quantization.rounding import FP8_CHANNEL, INT8_CHANNEL, round_to

INT4 = QuantScheme(Number.INT, 4, Granularity(1, 8), torch.float16)


def drawn(
    rows: int, columns: int, bits: int, granularity: Granularity, *, has_zero: bool, seed: int = 0
) -> tuple[QuantizedWeight, np.ndarray]:
    """A weight of whole numbers, and what it means in float64."""
    rng = np.random.default_rng(seed)
    half = 2 ** (bits - 1)
    codes = rng.integers(-half, half, (rows, columns))
    scale = rng.uniform(0.5, 2.0, granularity.scale_shape(rows, columns)).astype(np.float16)
    zero = rng.integers(-half, half, scale.shape)
    row_of = np.arange(rows) // (granularity.rows or rows)
    column_of = np.arange(columns) // (granularity.columns or columns)
    spread = np.ix_(row_of, column_of)
    meant = (codes - (zero if has_zero else 0 * zero)[spread]) * scale.astype(np.float64)[spread]
    as_tensor = torch.from_numpy(codes)
    scheme = QuantScheme(Number.INT, bits, granularity, torch.float16, is_symmetric=not has_zero)
    weight = QuantizedWeight(
        scheme,
        rows,
        columns,
        pack_nibbles(as_tensor + 8) if bits <= 4 else as_tensor.to(torch.int8),
        torch.from_numpy(scale),
        torch.from_numpy(zero).to(torch.int8) if has_zero else None,
    )
    return weight, meant


GRANULARITIES = [
    Granularity(None, None), Granularity(1, None), Granularity(1, 4), Granularity(4, 4), Granularity(None, 4),
]  # fmt: skip


@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_what_the_numbers_mean(granularity: Granularity, bits: int, has_zero: bool) -> None:
    weight, meant = drawn(10, 13, bits, granularity, has_zero=has_zero)
    assert np.array_equal(weight.dequantize(torch.float32).double().numpy(), meant.astype(np.float32))


@settings(max_examples=60, deadline=None)
@given(
    granularity=st.sampled_from(GRANULARITIES),
    bits=st.sampled_from([4, 8]),
    has_zero=st.booleans(),
    first=st.integers(0, 11),
    size=st.integers(1, 12),
    group=st.integers(0, 3),
    indices=st.lists(st.integers(0, 11), min_size=1, max_size=14),
)
def test_parts(
    granularity: Granularity,
    bits: int,
    has_zero: bool,
    first: int,
    size: int,
    group: int,
    indices: list[int],
) -> None:
    weight, _ = drawn(12, 14, bits, granularity, has_zero=has_zero)
    whole = weight.dequantize(torch.float32)
    assert torch.equal(weight.by_row().dequantize(torch.float32), whole)
    part = slice(first, first + size)
    assert torch.equal(weight.rows(part).dequantize(torch.float32), whole[part])
    index = torch.tensor(indices)
    assert torch.equal(weight.rows(index).dequantize(torch.float32), whole[index])
    start, stop = group * 4, min(group * 4 + 4 * size, 14)
    assert torch.equal(weight.columns(start, stop).dequantize(torch.float32), whole[:, start:stop])
    joined = stack([weight.rows(slice(0, 5)), weight.rows(slice(5, 12))], ["a", "b"])
    assert torch.equal(joined.dequantize(torch.float32), whole)


def test_a_group_is_not_cut_in_two() -> None:
    weight, _ = drawn(4, 16, 4, Granularity(1, 8), has_zero=False)
    with pytest.raises(ValueError, match="columns 4 to 12 of 16 cut a group of 8 that has one scale"):
        weight.columns(4, 12)


def test_columns_in_any_order() -> None:
    weight, _ = drawn(4, 16, 4, Granularity(1, 8), has_zero=True)
    order = torch.tensor([0, 1] * 8, dtype=torch.int32)
    shuffled = replace(weight, column_group=order, scheme=replace(weight.scheme, has_column_order=True))
    assert weight.zero is not None
    want = (weight.values() - weight.zero[:, order].float()) * weight.scale[:, order].float()
    assert torch.equal(shuffled.dequantize(torch.float32), want)
    assert torch.equal(shuffled.columns(3, 12).dequantize(torch.float32), want[:, 3:12])


def test_what_cannot_be_one_product() -> None:
    weight, _ = drawn(4, 16, 4, Granularity(1, 8), has_zero=False)
    other, _ = drawn(4, 16, 8, Granularity(1, 8), has_zero=False)
    with pytest.raises(
        ValueError, match=r"q and k are one product, but are quantized differently: int4.*; int8"
    ):
        stack([weight, other], ["q", "k"])
    scheme = replace(weight.scheme, has_column_order=True)
    orders = [replace(weight, scheme=scheme, column_group=torch.arange(16) % n) for n in (1, 2)]
    with pytest.raises(ValueError, match="q and k are one product, but differ in their column_group"):
        stack(orders, ["q", "k"])


@pytest.mark.parametrize(
    ("scheme", "limit"),
    [
        (INT8_CHANNEL, 1 / 254),
        (FP8_CHANNEL, 1 / 16),
        (INT4, 1 / 14),
        (QuantScheme(Number.FP4, 4, Granularity(1, 8), torch.float8_e8m0fnu), 0.3),
        (QuantScheme(Number.NF4, 4, Granularity(1, 8), torch.float32), 0.16),
    ],
    ids=str,
)
def test_rounding_is_to_the_nearest(scheme: QuantScheme, limit: float) -> None:
    weight = torch.randn(6, 20, generator=torch.Generator().manual_seed(3))
    weight[2] = 0
    found = round_to(weight, scheme)
    back = found.dequantize(torch.float32)
    largest = weight.abs().amax(1, keepdim=True)
    assert ((back - weight).abs() <= limit * largest + 1e-6).all()
    assert torch.equal(back[2], torch.zeros(20))
    again = round_to(back, scheme)
    if scheme.number is not Number.INT:
        assert torch.allclose(again.dequantize(torch.float32), back, rtol=1e-6)
    # no other code of the same block is nearer
    if scheme.number in TABLES:
        scale = found.scale.float().repeat_interleave(8, 1)[:, :20]
        table = torch.tensor(TABLES[scheme.number])
        nearest = (table * scale.unsqueeze(-1) - weight.unsqueeze(-1)).abs().amin(-1)
        assert torch.allclose((back - weight).abs(), nearest, atol=1e-6)


def test_it_says_what_it_is() -> None:
    assert str(INT4) == "int4, group 8"
    assert str(FP8_CHANNEL) == "fp8_e4m3, channel, activations fp8_e4m3 (dynamic, token)"
    assert (
        str(replace(INT4, is_symmetric=False, has_column_order=True))
        == "int4, group 8, with zero points, act-order"
    )
    assert str(Granularity(128, 128)) == "block 128×128" and str(Granularity(None, None)) == "tensor"
