"""Norm, rotation and store in one launch, against the three in float64."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_triton.rope_and_store import rope_and_store
from kernel_checks import assert_close, exact_in_fp8, gpu, poisoned

EPS = 1e-6


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    half = table.shape[1] // 2
    cos, sin = table.double()[positions][:, None].split(half, dim=-1)
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def check(
    num_tokens: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_norm: bool,
    block_size: int = 16,
) -> None:
    num_heads, num_kv_heads, head_dim, rotary_dim = shape
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim + 8, device=device).to(dtype)
    qkv = qkv[:, :-8]
    before = qkv.clone()
    positions = torch.randint(0, 64, (num_tokens,), device=device)
    angles = torch.randn(64, rotary_dim // 2, device=device)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    weights = torch.randn(2, head_dim, device=device).to(dtype)
    num_blocks = num_tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    kv = poisoned(num_blocks, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
    out = poisoned(num_tokens, num_heads, head_dim, dtype=dtype, device=device)
    qk_norm = (weights[0], weights[1], EPS) if has_norm else None
    got = rope_and_store(
        qkv, kv[:, 0], kv[:, 1], slots, positions, table, num_heads, qk_norm=qk_norm, out=out
    )
    assert got is out
    parts = qkv.double().unflatten(1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q, k, v = parts
    if has_norm:
        q, k = norm(q, weights[0]), norm(k, weights[1])
    # the interpreter cuts bfloat16 off where it should round, and normed numbers twice
    tolerance = 1.6e-2 if has_norm and dtype == torch.bfloat16 and device.type == "cpu" else None
    assert_close(out, rotate(q, positions, table), tolerance)
    stored = kv.transpose(1, 2).flatten(0, 1)
    assert_close(stored[slots, 0], rotate(k, positions, table), tolerance)
    assert torch.equal(stored[slots, 1].double(), v)
    untouched = torch.ones(len(stored), dtype=torch.bool, device=device)
    untouched[slots] = False
    assert stored[untouched].isnan().all()
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 32, 32), (3, 1, 24, 24), (9, 3, 40, 16)], ids=str)
def test_rope_and_store(
    shape: tuple[int, int, int, int], dtype: torch.dtype, has_norm: bool, device: torch.device
):
    check(5, shape, dtype, device, has_norm=has_norm)


def test_an_fp8_cache_holds_what_is_divided_by_its_scale(device: torch.device):
    heads = exact_in_fp8(3, 4, 16, device=device)
    qkv = (heads * torch.tensor([1, 1, 2, 4], device=device)[:, None]).flatten(1).bfloat16()
    kv = torch.zeros(2, 2, 16, 1, 16, device=device).to(torch.float8_e4m3fn)
    slots = torch.tensor([3, 17, 20], device=device)
    table = torch.cat([torch.ones(1, 8), torch.zeros(1, 8)], dim=1).to(device)  # no rotation
    positions = torch.zeros(3, dtype=torch.int64, device=device)
    scales = (torch.tensor([2.0], device=device), torch.tensor([4.0], device=device))
    rope_and_store(qkv, kv[:, 0], kv[:, 1], slots, positions, table, 2, kv_scales=scales)
    stored = kv.float().transpose(1, 2).flatten(0, 1)[slots]
    assert torch.equal(stored[:, 0], heads[:, 2:3])
    assert torch.equal(stored[:, 1], heads[:, 3:4])


def test_a_projection_of_the_wrong_width_is_refused(device: torch.device):
    kv = torch.zeros(2, 2, 16, 1, 16, device=device)
    index = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="qkv has 48 columns"):
        rope_and_store(
            torch.zeros(3, 48, device=device), kv[:, 0], kv[:, 1], index, index,
            torch.zeros(4, 16, device=device), 2,
        )  # fmt: skip


@gpu
@pytest.mark.parametrize("shape", [(32, 8, 128, 128), (32, 4, 128, 64), (9, 3, 64, 64)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 500])
def test_at_real_shapes(num_tokens: int, shape: tuple[int, int, int, int], device: torch.device):
    check(num_tokens, shape, torch.bfloat16, device, has_norm=True, block_size=64)
