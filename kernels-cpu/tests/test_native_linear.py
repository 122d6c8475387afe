"""Native products at every level of instructions, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native_linear import DTYPES, NativeLinear

pytestmark = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=str(native.unavailable_reason())
)
LEVELS = native.levels()
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def check(got: torch.Tensor, want: torch.Tensor, scale: float | torch.Tensor = 1.0) -> None:
    """Within a rounding of the largest value and of each value."""
    assert got.shape == want.shape
    tolerance = TOLERANCES[got.dtype]
    assert ((got.double() - want).abs() <= tolerance * (want.abs() + scale)).all()


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    num_tokens=st.one_of(st.integers(0, 40), st.sampled_from([64, 97, 200])),
    in_features=st.one_of(st.integers(1, 80), st.sampled_from([256, 576, 600])),
    out_features=st.one_of(st.integers(1, 70), st.sampled_from([96, 200])),
    has_bias=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_products_of_any_shape(
    level: str,
    dtype: torch.dtype,
    num_tokens: int,
    in_features: int,
    out_features: int,
    has_bias: bool,
    seed: int,
) -> None:
    x = drawn(seed, num_tokens, in_features).to(dtype)
    weight = drawn(seed + 1, out_features, in_features).to(dtype)
    bias = drawn(seed + 2, out_features).to(dtype) if has_bias else None
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    check(NativeLinear(weight, bias, level)(x), want, in_features**0.5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "in_features"), [(3, 4100), (50, 2500), (33, 2047), (700, 1536), (2100, 576)]
)
def test_depths_and_tokens_that_are_taken_in_parts(
    level: str, dtype: torch.dtype, num_tokens: int, in_features: int
) -> None:
    x, weight = drawn(0, num_tokens, in_features).to(dtype), drawn(1, 75, in_features).to(dtype)
    check(NativeLinear(weight, None, level)(x), x.double() @ weight.double().T, in_features**0.5)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    num_tokens=st.sampled_from([0, 1, 2, 3, 4, 7, 17, 40, 203]),
    in_features=st.one_of(st.integers(1, 80), st.sampled_from([576])),
    half=st.integers(1, 70),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    is_gated=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_norm_before_and_gate_behind(
    level: str,
    dtype: torch.dtype,
    num_tokens: int,
    in_features: int,
    half: int,
    has_bias: bool,
    has_residual: bool,
    is_gated: bool,
    seed: int,
) -> None:
    x = drawn(seed, num_tokens, in_features).to(dtype)
    residual = drawn(seed + 1, num_tokens, in_features).to(dtype) if has_residual else None
    weight = (drawn(seed + 2, 2 * half, in_features) / in_features**0.5).to(dtype)
    bias = drawn(seed + 3, 2 * half).to(dtype) if has_bias else None
    norm_weight = drawn(seed + 4, in_features).to(dtype)
    total = x if residual is None else x + residual  # rounded, as it is kept
    wide = total.double()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(dtype)
    normed = (normed * norm_weight).to(dtype).double()
    product = normed @ weight.double().T + (0 if bias is None else bias.double())
    want = silu(product[:, :half]) * product[:, half:] if is_gated else product
    multiply = NativeLinear(weight, bias, level)
    x_before = x.clone()
    if is_gated and residual is None:
        plain = multiply.silu_and_mul(normed.to(dtype))
        check(plain, want, 2.0)
    got, kept = multiply.after_add_rms_norm(x, residual, norm_weight, 1e-5, is_gated=is_gated)
    assert torch.equal(kept, total)
    assert torch.equal(x, x_before)
    # one rounding of the normed row may fall to the other side
    difference = (got.double() - want).abs()
    assert (difference <= 3 * TOLERANCES[dtype] * (want.abs() + 4)).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_what_is_not_finite_stays_where_it_is(level: str, dtype: torch.dtype, num_tokens: int) -> None:
    weight, x = torch.ones(40, 70, dtype=dtype), torch.ones(num_tokens, 70, dtype=dtype)
    weight[5, 69] = float("nan")
    weight[17, 3] = float("inf")
    weight[39, 0] = float("-inf")
    x[-1, 69] = float("inf")
    want = x.double() @ weight.double().T
    assert torch.equal(
        NativeLinear(weight, None, level)(x).double().nan_to_num(7, 8, 9), want.nan_to_num(7, 8, 9)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_token_alone_and_among_others(dtype: torch.dtype) -> None:
    weight = drawn(0, 100, 96).to(dtype)
    x = drawn(1, 70, 96).to(dtype)
    together = NativeLinear(weight, None)(x)
    for rows in (1, 2, 3, 17):
        check(NativeLinear(weight, None)(x[:rows]), together[:rows].double(), 10.0)


def columns(x: torch.Tensor) -> torch.Tensor:
    """As a part of a fused projection's product lies."""
    return torch.cat([x, x, x], -1)[:, x.shape[1] : -x.shape[1]]


def transposed(x: torch.Tensor) -> torch.Tensor:
    """As a state-space mixer's round of segments lies, channels before tokens."""
    return x.t().contiguous().t()


def other_rows(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, 0)[1::2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 40])
@pytest.mark.parametrize("layout", [columns, transposed, other_rows])
def test_rows_that_lie_in_any_way(
    layout: Callable[[torch.Tensor], torch.Tensor], num_tokens: int, dtype: torch.dtype
) -> None:
    """Bit for bit what the same rows give when they are contiguous."""
    weight, norm_weight = drawn(0, 64, 48).to(dtype), drawn(1, 48).to(dtype)
    x, residual = drawn(2, num_tokens, 48).to(dtype), drawn(3, num_tokens, 48).to(dtype)
    multiply = NativeLinear(weight, None)
    assert torch.equal(multiply(layout(x)), multiply(x))
    assert torch.equal(multiply.silu_and_mul(layout(x)), multiply.silu_and_mul(x))
    out = torch.empty(num_tokens, 64, dtype=dtype)
    multiply.into(out, layout(x))
    assert torch.equal(out, multiply(x))
    for is_gated in (False, True):
        want = multiply.after_add_rms_norm(x, residual.clone(), norm_weight, 1e-5, is_gated=is_gated)
        got = multiply.after_add_rms_norm(layout(x), layout(residual), norm_weight, 1e-5, is_gated=is_gated)
        assert all(map(torch.equal, got, want))
        alone = multiply.after_add_rms_norm(layout(x), None, norm_weight, 1e-5, is_gated=is_gated)
        assert all(
            map(
                torch.equal, alone, multiply.after_add_rms_norm(x, None, norm_weight, 1e-5, is_gated=is_gated)
            )
        )
