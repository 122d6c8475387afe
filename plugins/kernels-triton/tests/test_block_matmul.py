"""Rows in fp8 times a weight with a scale for each block, against float64."""

from __future__ import annotations

import pytest
import torch

from block_weights import draw_blocks, draw_rows
from inferplane_kernels_triton.block_matmul import BlockMatmulConfig, block_matmul
from kernel_checks import assert_close, gpu, poisoned

SMALL = BlockMatmulConfig(tokens=16, rows=16, columns=64, together=2, num_stages=1)


def check(
    num_tokens: int,
    out_features: int,
    in_features: int,
    device: torch.device,
    config: BlockMatmulConfig | None,
    *,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float16,
    has_bias: bool = False,
    pdl: bool = False,
) -> None:
    weight, scale, wide_weight = draw_blocks(out_features, in_features, *block, device)
    x, x_scale, wide_x = draw_rows(num_tokens, in_features, device)
    bias = torch.randn(out_features, device=device).to(dtype) if has_bias else None
    out = poisoned(num_tokens, out_features, dtype=dtype, device=device)
    assert block_matmul(x, x_scale, weight, scale, bias=bias, out=out, config=config, pdl=pdl) is out
    want = wide_x @ wide_weight.T
    assert_close(out, want if bias is None else want + bias.double())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("block", [(128, 128), (1, 128), (24, 256)], ids=str)
@pytest.mark.parametrize("shape", [(1, 16, 128), (40, 150, 320), (17, 33, 72)], ids=str)
def test_block_matmul(
    shape: tuple[int, int, int], block: tuple[int, int], has_bias: bool, device: torch.device
):
    check(*shape, device, SMALL, block=block, has_bias=has_bias)


def test_what_does_not_fit_is_refused(device: torch.device):
    weight, scale, _ = draw_blocks(16, 256, 128, 128, device)
    x, x_scale, _ = draw_rows(2, 256, device)
    assert block_matmul(x[:0], x_scale[:0], weight, scale, config=SMALL).shape == (0, 16)
    with pytest.raises(ValueError, match="needs 256 columns"):
        block_matmul(x[:, :128], x_scale, weight, scale)
    with pytest.raises(ValueError, match=r"x_scale has shape \(2, 1\)"):
        block_matmul(x, x_scale[:, :1], weight, scale)
    with pytest.raises(ValueError, match="contiguous columns"):
        block_matmul(x, x_scale.contiguous(), weight, scale)
    with pytest.raises(ValueError, match=r"scale has shape \(1, 2\), needs \(2, 2\)"):
        block_matmul(x, x_scale, weight.repeat(9, 1), scale)


@gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("num_tokens", [65, 300, 8192])
def test_at_real_shapes(num_tokens: int, pdl: bool, device: torch.device):
    for out_features, in_features in ((6144, 4096), (4096, 14336), (576, 7168), (7232, 1000)):
        check(num_tokens, out_features, in_features, device, None, dtype=torch.bfloat16, pdl=pdl)
    check(num_tokens, 4000, 2048, device, None, block=(1, 128), dtype=torch.bfloat16, has_bias=True, pdl=pdl)
