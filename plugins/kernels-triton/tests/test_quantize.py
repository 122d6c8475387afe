"""Quantized activations times their scales are about the activations."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_triton.quantize import quantize_per_token
from kernel_checks import gpu

STEP = 2.0**-4 if torch.cuda.is_available() else 0.5
"""Largest relative error of e4m3; Triton's interpreter (3.7) loses a carry, which can halve a number."""


def check(x: torch.Tensor, *, by_group: bool = False) -> None:
    quantized, scale = quantize_per_token(x, by_group=by_group)
    assert quantized.dtype == torch.float8_e4m3fn and quantized.shape == x.shape
    groups = x.double().abs().split(128 if by_group else x.shape[1], dim=1)
    largest = torch.cat([group.amax(-1, keepdim=True) for group in groups], dim=1)
    assert torch.allclose(scale.double() * 448, largest, rtol=1e-6)
    # torch's scaled product looks at the strides of dimensions of one, too
    assert scale.T.is_contiguous() if by_group else scale.stride() == (1, 1)
    if by_group:
        scale = scale.repeat_interleave(128, 1)[:, : x.shape[1]]
    got = quantized.double() * scale.double()
    assert ((got - x.double()).abs() <= STEP * x.double().abs() + scale * 2.0**-9).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 100)], ids=str)
def test_quantize_per_token(shape: tuple[int, int], dtype: torch.dtype, device: torch.device):
    check(torch.randn(*shape, device=device).to(dtype) * torch.tensor([1e-3], device=device).to(dtype))


@pytest.mark.parametrize("shape", [(1, 64), (3, 128), (2, 700)], ids=str)
def test_by_group(shape: tuple[int, int], device: torch.device):
    check(torch.randn(*shape, device=device), by_group=True)


def test_zeros_stay_zeros(device: torch.device):
    quantized, scale = quantize_per_token(torch.zeros(2, 32, device=device))
    assert not quantized.float().any() and scale.isfinite().all()


@gpu
def test_at_real_shapes(device: torch.device):
    for by_group in (False, True):
        check(torch.randn(999, 14336, device=device).bfloat16(), by_group=by_group)
