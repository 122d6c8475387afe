"""Comparing what a device computed with what float64 on the host says."""

from __future__ import annotations

import torch

from inferplane.api.ops import Tolerance

MAX_SCALE_ERROR = 4e-3
"""Rounding is as often up as down: over a whole result, even bfloat16's cancels out. What remains is an error of the
formula, such as a factor that is wrong by a percent and would hide in a half-precision tolerance."""
MIN_ELEMENTS_FOR_SCALE = 64


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, what: str) -> None:
    """Element by element within the tolerance, and not off as a whole by a factor. Both in host memory."""
    assert found.shape == expected.shape, f"{what}: {list(found.shape)} instead of {list(expected.shape)}"
    if not expected.is_floating_point():
        assert torch.equal(found.long(), expected.long()), f"{what}: other numbers"
        return
    assert found.is_floating_point(), f"{what}: {found.dtype} instead of a float type"
    rel, abs_ = tolerance
    assert_within(found, expected, abs_ + rel * expected.abs(), f"rtol {rel:g}, atol {abs_:g}", what)
    assert_scale(found, expected, what)


def assert_within(
    found: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor, rule: str, what: str
) -> None:
    """``allowed``: how far each element may be off, which ``rule`` says in words."""
    wide = found.double()
    assert not wide.isnan().any(), f"{what}: {int(wide.isnan().sum())} of {wide.numel()} elements are NaN"
    excess = (wide - expected).abs() - allowed
    if excess.numel() and excess.max() > 0:
        at = int(excess.argmax())
        raise AssertionError(
            f"{what}: {int((excess > 0).sum())} of {wide.numel()} elements are off by more than {rule}; the worst is "
            f"{wide.flatten()[at]:.6g} instead of {expected.flatten()[at]:.6g}"
        )


def assert_scale(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    scale = scale_error(found.double(), expected)
    assert scale <= MAX_SCALE_ERROR, f"{what}: as a whole too large or small by {scale:.2%}"


def is_unchanged(found: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether the numbers are the very same; one that is not a number may have other bits."""
    return found.shape == before.shape and bool(((found == before) | (found.isnan() & before.isnan())).all())


def scale_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """By how much the factor that takes ``expected`` closest to ``found`` differs from 1."""
    energy = float((expected * expected).sum())
    if expected.numel() < MIN_ELEMENTS_FOR_SCALE or energy == 0.0:
        return 0.0
    return abs(float((found * expected).sum()) / energy - 1.0)
