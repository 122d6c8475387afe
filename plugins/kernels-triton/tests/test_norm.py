"""Norms against float64: ragged widths, views with strides, the residual in place."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_triton.norm import add_rms_norm, add_rms_norm_in_fp8, rms_norm
from inferplane_kernels_triton.quantize import quantize_per_token
from kernel_checks import assert_close, gpu, poisoned

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


def check_rms_norm(x: torch.Tensor) -> None:
    weight = torch.randn(x.shape[-1], device=x.device).to(x.dtype)
    out = poisoned(*x.shape, dtype=x.dtype, device=x.device)
    kept = x.clone()
    assert rms_norm(x, weight, EPS, out=out) is out
    assert_close(out, reference(x, weight))
    assert torch.equal(x, kept)


def check_add_rms_norm(num_tokens: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(num_tokens, dim + 16, device=device).to(dtype)[:, :dim]
    residual = torch.randn(num_tokens, dim + 16, device=device).to(dtype)[:, 16:]
    weight = torch.randn(dim, device=device).to(dtype)
    total = x.double() + residual.double()
    out = poisoned(num_tokens, dim, dtype=dtype, device=device)
    got, got_residual = add_rms_norm(x, residual, weight, EPS, out=out)
    assert got is out and got_residual is residual
    assert_close(residual, total)
    assert_close(out, reference(residual, weight))


def place_of(codes: torch.Tensor) -> torch.Tensor:
    """Of each e4m3 number among all of them, 0 in the middle."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def check_add_rms_norm_in_fp8(
    num_tokens: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_residual: bool,
    by_group: bool = False,
) -> None:
    """What the two kernels make that it stands for, each of which is compared with float64 elsewhere. The squares may
    be added up in another order, so that the norm of some numbers in thousands rounds the other way and the code is
    the next one."""
    x = torch.randn(num_tokens, dim + 16, device=device).to(dtype)[:, :dim]
    residual = torch.randn(num_tokens, dim + 16, device=device).to(dtype)[:, 16:] if has_residual else None
    weight = torch.randn(dim, device=device).to(dtype)
    if residual is None:
        normed, total = rms_norm(x, weight, EPS), x
    else:
        normed, total = add_rms_norm(x, residual.clone(), weight, EPS)
    codes, scale, found = add_rms_norm_in_fp8(x, residual, weight, EPS, by_group=by_group)
    want_codes, want_scale = quantize_per_token(normed, by_group=by_group)
    steps = (place_of(codes) - place_of(want_codes)).abs()
    assert steps.max() <= 1 and steps.float().mean() <= 1e-3
    assert_close(scale, want_scale.double(), torch.finfo(dtype).eps)
    assert torch.equal(found, total)
    assert found is (x if residual is None else residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
def test_add_rms_norm_in_fp8(has_residual: bool, dtype: torch.dtype, device: torch.device):
    check_add_rms_norm_in_fp8(3, 96, dtype, device, has_residual=has_residual)
    check_add_rms_norm_in_fp8(3, 300, dtype, device, has_residual=has_residual, by_group=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 64), (3, 96), (2, 1000)])
def test_rms_norm(num_tokens: int, dim: int, dtype: torch.dtype, device: torch.device):
    check_rms_norm(torch.randn(num_tokens, dim, device=device).to(dtype))


def test_rms_norm_of_heads_inside_a_packed_projection(device: torch.device):
    packed = torch.randn(3, 4, 24, device=device).bfloat16()
    check_rms_norm(packed[:, 1:3])
    check_rms_norm(packed[:, :, :16])


def test_rms_norm_of_more_dimensions_and_of_nothing(device: torch.device):
    check_rms_norm(torch.randn(2, 2, 3, 32, device=device))
    assert rms_norm(torch.empty(0, 32, device=device), torch.ones(32, device=device), EPS).shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "dim"), [(1, 64), (3, 96)])
def test_add_rms_norm(num_tokens: int, dim: int, dtype: torch.dtype, device: torch.device):
    check_add_rms_norm(num_tokens, dim, dtype, device)


def test_strided_rows_are_refused(device: torch.device):
    with pytest.raises(ValueError, match=r"x: the last dimension has stride 2"):
        rms_norm(torch.randn(4, 32, device=device)[:, ::2], torch.ones(16, device=device), EPS)


@gpu
@pytest.mark.parametrize("num_tokens", [1, 33, 4096])
@pytest.mark.parametrize("dim", [2048, 4096, 5120, 16384])
def test_at_real_shapes(num_tokens: int, dim: int, device: torch.device):
    check_rms_norm(torch.randn(num_tokens, dim, device=device).bfloat16())
    check_add_rms_norm(num_tokens, dim, torch.bfloat16, device)
    for by_group in (False, True):
        check_add_rms_norm_in_fp8(
            num_tokens, dim, torch.bfloat16, device, has_residual=True, by_group=by_group
        )
