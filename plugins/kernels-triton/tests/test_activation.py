"""Gated activations against float64."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_triton.activation import silu_and_mul
from kernel_checks import assert_close, gpu, poisoned


def check(x: torch.Tensor) -> None:
    gate, up = x.double().chunk(2, dim=-1)
    out = poisoned(*gate.shape, dtype=x.dtype, device=x.device)
    assert silu_and_mul(x, out=out) is out
    assert_close(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 16), (3, 50), (2, 1100)])
def test_silu_and_mul(num_tokens: int, dim: int, dtype: torch.dtype, device: torch.device):
    check(torch.randn(num_tokens, 2 * dim, device=device).to(dtype))


def test_rows_with_a_stride_large_values_and_nothing(device: torch.device):
    check(torch.randn(4, 100, device=device)[:, :64] * 100)
    assert silu_and_mul(torch.empty(0, 64, device=device)).shape == (0, 32)


@gpu
@pytest.mark.parametrize("num_tokens", [1, 33, 4096])
def test_at_real_shapes(num_tokens: int, device: torch.device):
    check(torch.randn(num_tokens, 28672, device=device).bfloat16())
