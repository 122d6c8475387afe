"""Rotation against float64: whole and partial heads, packed projections, any number of heads."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_triton.rotary import rotary
from kernel_checks import assert_close, gpu

SHAPES = [(4, 2, 32, 32), (3, 1, 24, 24), (9, 3, 40, 16)]
"""num_heads, num_kv_heads, head_dim, rotary_dim."""


def make_table(rotary_dim: int, device: torch.device, max_positions: int = 64) -> torch.Tensor:
    angles = torch.randn(max_positions, rotary_dim // 2, device=device)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def reference(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    half = table.shape[1] // 2
    cos, sin = table.double()[positions][:, None].split(half, dim=-1)
    first, second, rest = x.double().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def check(
    num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim = shape
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    before = qkv.clone()
    q, k = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads]
    positions = torch.randint(0, 64, (num_tokens,), device=device)
    table = make_table(rotary_dim, device)
    want_q, want_k = reference(q, positions, table), reference(k, positions, table)
    got_q, got_k = rotary(q, k, positions, table)
    assert_close(got_q, want_q)
    assert_close(got_k, want_k)
    assert torch.equal(qkv[:, num_heads + num_kv_heads :], before[:, num_heads + num_kv_heads :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
    check(3, shape, dtype, device)


def test_nothing(device: torch.device):
    check(0, SHAPES[0], torch.float32, device)


@gpu
@pytest.mark.parametrize("shape", [(32, 8, 128, 128), (64, 4, 128, 64), (9, 3, 64, 64)], ids=str)
def test_at_real_shapes(shape: tuple[int, int, int, int], device: torch.device):
    check(777, shape, torch.bfloat16, device)
