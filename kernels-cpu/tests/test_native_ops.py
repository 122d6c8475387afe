"""Native elementwise ops, at each level of instructions, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import gelu, silu

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native_ops import DTYPES, NativeOps

pytestmark = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=str(native.unavailable_reason())
)

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
SHAPES = [(1, 96), (5, 64), (3, 37), (300, 576), (7, 1)]
EPS = 1e-6


@pytest.fixture(params=native.LEVELS)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    if request.param not in native.levels():
        pytest.skip("not on this machine")
    return NativeOps(at=request.param)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    limit = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(ops: NativeOps, shape: tuple[int, int], dtype: torch.dtype) -> None:
    wide, weight = random(shape[0], shape[1] + 3, dtype=dtype), random(shape[1], dtype=dtype)
    x, residual = wide[:, : shape[1]], random(*shape, dtype=dtype) * 2
    before = wide.clone()
    check(ops.rms_norm(x, weight, EPS), norm(x, weight))
    total = (x.double() + residual.double()).to(dtype)  # the stream is kept in the dtype, and normed so
    normed, kept = ops.add_rms_norm(x, residual, weight, EPS)
    assert kept.data_ptr() == residual.data_ptr()
    check(kept, total.double())
    check(normed, norm(kept, weight))
    assert torch.equal(wide, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates(ops: NativeOps, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = random(shape[0], 2 * shape[1], dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    check(ops.silu_and_mul(gate_up), silu(gate) * up)
    check(ops.gelu_tanh_and_mul(gate_up), gelu(gate, approximate="tanh") * up)


def test_gates_far_from_zero(ops: NativeOps) -> None:
    gate = torch.tensor([-1e4, -200.0, -88.0, -0.0, 88.0, 200.0, 1e4, math.nan])
    gate_up = torch.cat([gate, torch.ones(8)]).unsqueeze(0)
    for op, activation in (
        (ops.silu_and_mul, silu),
        (ops.gelu_tanh_and_mul, lambda x: gelu(x, approximate="tanh")),
    ):
        torch.testing.assert_close(op(gate_up)[0], activation(gate), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 64), (80, 40), (24, 10)])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_rotary(ops: NativeOps, num_tokens: int, head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    qkv = random(num_tokens, 7, head_dim, dtype=dtype)
    positions = torch.arange(num_tokens).flip(0)
    angles = random(num_tokens, rotary_dim // 2, dtype=torch.float32)
    half = rotary_dim // 2
    cos, sin = angles.double().cos()[positions].unsqueeze(1), angles.double().sin()[positions].unsqueeze(1)
    first, second, rest = qkv.double().split([half, half, head_dim - rotary_dim], dim=-1)
    want = torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
    v = qkv[:, 6:].clone()
    q, k = ops.rotary(qkv[:, :4], qkv[:, 4:6], positions, torch.cat([angles.cos(), angles.sin()], dim=-1))
    check(torch.cat([q, k], dim=1), want[:, :6])
    assert torch.equal(qkv[:, 6:], v)
