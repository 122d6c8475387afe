"""Scaled products against float64."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_cuda.fp8 import scaled_linear
from kernel_checks import assert_close, gpu


@gpu
@pytest.mark.parametrize("shape", [(1, 64, 128), (33, 4096, 4096), (7, 6144, 4096)], ids=str)
def test_scaled_linear(shape: tuple[int, int, int]):
    num_tokens, out_features, in_features = shape
    x = torch.randn(num_tokens, in_features, device="cuda").to(torch.float8_e4m3fn)
    weight = torch.randn(out_features, in_features, device="cuda").to(torch.float8_e4m3fn)
    x_scale = torch.rand(num_tokens, 1, device="cuda")
    weight_scale = torch.rand(out_features, 1, device="cuda")
    got = scaled_linear(x, x_scale, weight, weight_scale, torch.bfloat16)
    assert_close(got, (x.double() * x_scale.double()) @ (weight.double() * weight_scale.double()).T)


def test_odd_sizes_are_refused():
    x, weight = torch.zeros(2, 20).to(torch.float8_e4m3fn), torch.zeros(32, 20).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="in_features is 20, needs a multiple of 16"):
        scaled_linear(x, torch.ones(2, 1), weight, torch.ones(32, 1), torch.bfloat16)
