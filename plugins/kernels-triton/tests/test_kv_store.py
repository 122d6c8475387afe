"""Stored keys and values lie in the slots that the mapping names, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_triton.kv_store import store_kv
from kernel_checks import exact_in_fp8, gpu, poisoned


def check(
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
) -> None:
    packed = torch.randn(num_tokens, 3 * num_kv_heads, head_dim, device=device).to(dtype)
    k, v = packed[:, num_kv_heads : 2 * num_kv_heads], packed[:, 2 * num_kv_heads :]
    num_blocks = num_tokens // block_size + 2
    kv = poisoned(num_blocks, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    store_kv(k, v, kv[:, 0], kv[:, 1], slots)
    stored = kv.transpose(1, 2).flatten(0, 1)
    assert torch.equal(stored[slots, 0], k)
    assert torch.equal(stored[slots, 1], v)
    untouched = torch.ones(len(stored), dtype=torch.bool, device=device)
    untouched[slots] = False
    assert stored[untouched].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 16), (3, 24), (8, 32)])
@pytest.mark.parametrize("num_tokens", [0, 1, 19])
def test_store_kv(
    num_tokens: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
):
    check(num_tokens, num_kv_heads, head_dim, dtype, device, block_size=16)


def test_an_fp8_cache_holds_what_is_divided_by_the_scale_of_its_head(device: torch.device):
    k, v = exact_in_fp8(2, 2, 3, 16, device=device)
    kv = torch.zeros(1, 2, 16, 3, 16, device=device).to(torch.float8_e4m3fn)
    scales = torch.tensor([[2.0, 0.5, 8.0], [4.0, 1.0, 0.25]], device=device)
    scaled_k, scaled_v = k * scales[0].unsqueeze(1), v * scales[1].unsqueeze(1)
    slots = torch.tensor([3, 5], device=device)
    store_kv(scaled_k, scaled_v, kv[:, 0], kv[:, 1], slots, kv_scales=(scales[0], scales[1]))
    assert torch.equal(kv[0, 0, [3, 5]].float(), k)
    assert torch.equal(kv[0, 1, [3, 5]].float(), v)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_fp8_cannot_hold_is_its_largest_number(dtype: torch.dtype, device: torch.device):
    k, v = torch.full((1, 1, 16), 1e6, device=device), torch.full((1, 1, 16), -1e6, device=device)
    kv = torch.zeros(1, 2, 16, 1, 16, device=device).to(dtype)
    ones = torch.ones(1, device=device)
    store_kv(k, v, kv[:, 0], kv[:, 1], torch.tensor([3], device=device), kv_scales=(ones, ones))
    limit = torch.finfo(dtype).max
    assert (kv[0, 0, 3].float() == limit).all() and (kv[0, 1, 3].float() == -limit).all()


def test_an_int8_cache_has_a_scale_for_each_slot_and_head(device: torch.device):
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 3, 24, device=device)
    k[1, 2] = 0
    kv = torch.zeros(2, 2, 16, 3, 24, dtype=torch.int8, device=device)
    scales = torch.full((2, 2, 16, 3), float("nan"), device=device)
    store_kv(
        k, v, kv[:, 0], kv[:, 1], torch.tensor([3, 21], device=device), kv_scales=(scales[:, 0], scales[:, 1])
    )
    for half, plain in enumerate((k, v)):
        for token, slot in enumerate(((0, 3), (1, 5))):
            want = plain[token].double()
            scale = want.abs().amax(-1) / 127
            scale[scale == 0] = 1
            found = scales[slot[0], half, slot[1]].double()
            torch.testing.assert_close(found, scale, rtol=1e-6, atol=0)
            numbers = kv[slot[0], half, slot[1]].double()
            assert ((numbers - want / scale[:, None]).abs() <= 0.5 + 1e-4).all()
    assert scales.isnan().sum() == scales.numel() - 12
    with pytest.raises(ValueError, match="needs kv_scales, one for each slot and head"):
        store_kv(k, v, kv[:, 0], kv[:, 1], torch.tensor([3, 5], device=device))


def test_scales_of_other_heads_are_refused(device: torch.device):
    kv = torch.zeros(1, 2, 16, 2, 16, device=device).to(torch.float8_e4m3fn)
    x, one = torch.zeros(1, 2, 16, device=device), torch.ones(1, device=device)
    slots = torch.tensor([3], device=device)
    with pytest.raises(ValueError, match=r"scales of 2 KV heads are \[2\] float32, not \[1\]"):
        store_kv(x, x, kv[:, 0], kv[:, 1], slots, kv_scales=(one, one))


@gpu
def test_at_real_shapes(device: torch.device):
    check(4096, 8, 128, torch.bfloat16, device, block_size=64)
