"""How a kernel's result is compared with a reference in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest ‖got − want‖ / ‖want‖."""

MATRIX_DTYPES = [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
"""Half-precision dtypes that `tl.dot` can be tested with: the interpreter multiplies the bit patterns of bfloat16."""

SLOW_WHEN_INTERPRETED = [] if torch.cuda.is_available() else [pytest.mark.slow]
"""Marks of a case that a quick run on the host leaves out: what it adds to the others is no branch of its own."""


def exact_in_fp8(*shape: int, device: torch.device) -> torch.Tensor:
    """Random float32 numbers that e4m3 represents.

    Triton's interpreter (3.7) loses a carry where rounding to it reaches a power of two.
    """
    return torch.randn(*shape, device=device).mul(20).to(torch.float8_e4m3fn).float()


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An output in which every element that is not written stays NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    """``want`` is float64; the tolerance goes by got's dtype. NaN never passes."""
    assert got.shape == want.shape
    limit = TOLERANCES[got.dtype] if tolerance is None else tolerance
    error = (got.double() - want.to(got.device)).norm() / want.norm().clamp_min(1e-30)
    assert error.item() <= limit, f"relative error {error.item():.2e} > {limit:.0e}"


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test at real shapes: it needs an accelerator and skips itself where there is none."""
    needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    return pytest.mark.gpu(needs(test))
