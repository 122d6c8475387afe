"""Products and what is fused with them, against the ops in float64."""

from __future__ import annotations

import pytest
import torch

from inferplane.api import DeviceDescriptor
from inferplane.api.linear import LinearShape
from inferplane.api.ops import add_rms_norm, rms_norm, silu_and_mul
from inferplane_torch_accelerator.dense_multiply import DenseMultiply
from inferplane_torch_accelerator.linear import DenseLinear

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}
IN, OUT = 96, 80


def drawn(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(device, dtype)


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    error = (got.double() - want).norm() / want.norm()
    assert error < TOLERANCES[dtype], error


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products(dtype: torch.dtype, num_rows: int, has_bias: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    weight = drawn(device, dtype, OUT, IN)
    bias = drawn(device, dtype, OUT) if has_bias else None
    multiply = DenseLinear.prepare(weight, bias)
    assert isinstance(multiply, DenseMultiply)
    x, residual = drawn(device, dtype, num_rows, IN), drawn(device, dtype, num_rows, IN)
    norm = drawn(device, dtype, IN)
    wide_bias = None if bias is None else bias.double()

    def product(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(y, weight.double(), wide_bias)

    total = x + residual
    after_sum = product(add_rms_norm(x.double(), residual.double(), norm.double(), 1e-5)[0])
    after_norm = product(rms_norm(x.double(), norm.double(), 1e-5))
    assert_near(multiply(x), product(x.double()), dtype)
    assert_near(multiply.silu_and_mul(x), silu_and_mul(product(x.double())), dtype)
    for is_gated in (False, True):
        got, found = multiply.after_add_rms_norm(x.clone(), residual.clone(), norm, 1e-5, is_gated=is_gated)
        assert_near(got, silu_and_mul(after_sum) if is_gated else after_sum, dtype)
        assert_near(found, total.double(), dtype)  # the interpreter rounds bfloat16 to zero
        got, found = multiply.after_add_rms_norm(x.clone(), None, norm, 1e-5, is_gated=is_gated)
        assert_near(got, silu_and_mul(after_norm) if is_gated else after_norm, dtype)
        assert torch.equal(found, x)


def test_what_it_multiplies() -> None:
    device = DeviceDescriptor("acme", 0, "", 0)
    assert DenseLinear.unsupported_reason(LinearShape("w", IN, OUT, torch.bfloat16, False), device) is None
    reason = DenseLinear.unsupported_reason(LinearShape("w", IN, OUT, torch.float64, False), device)
    assert reason is not None and "not torch.float64" in reason
