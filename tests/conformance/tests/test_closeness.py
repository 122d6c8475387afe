"""A percent is seen in every type; rounding is not mistaken for one."""

from __future__ import annotations

import pytest
import torch

from inferplane.api.ops import DEFAULT_TOLERANCES
from inferplane_conformance.closeness import assert_close, is_unchanged

DTYPES = pytest.mark.parametrize("dtype", DEFAULT_TOLERANCES, ids=str)


def numbers() -> torch.Tensor:
    return torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@DTYPES
def test_rounding_is_close(dtype: torch.dtype):
    assert_close(numbers().to(dtype), numbers(), DEFAULT_TOLERANCES[dtype], "x")


@DTYPES
def test_a_percent_is_not(dtype: torch.dtype):
    with pytest.raises(AssertionError, match="x: "):
        assert_close((numbers() * 1.01).to(dtype), numbers(), DEFAULT_TOLERANCES[dtype], "x")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.full((3,), torch.nan), "3 of 3 elements are NaN"),
        (torch.ones(2), r"\[2\] instead of \[3\]"),
        (torch.tensor([1.0, 1.0, 1.1]), "worst is 1.1 instead of 1"),
        (torch.ones(3, dtype=torch.int64), "instead of a float type"),
    ],
)
def test_what_is_wrong_is_said(found: torch.Tensor, message: str):
    with pytest.raises(AssertionError, match=message):
        assert_close(found, torch.ones(3, dtype=torch.float64), (1e-5, 1e-5), "x")


def test_whole_numbers_are_equal_or_not():
    assert_close(torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 2]), (0, 0), "x")
    with pytest.raises(AssertionError, match="other numbers"):
        assert_close(torch.tensor([1, 3]), torch.tensor([1, 2]), (0, 0), "x")


def test_an_argument_may_hold_what_is_no_number():
    before = torch.tensor([1.0, float("nan"), float("-inf"), 0.0])
    assert is_unchanged(before.clone(), before)
    assert is_unchanged(torch.tensor([True, False]), torch.tensor([True, False]))
    for index in range(len(before)):
        other = before.clone()
        other[index] = 2.0
        assert not is_unchanged(other, before)
    assert not is_unchanged(before[:3], before)
