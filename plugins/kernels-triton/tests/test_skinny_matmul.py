"""A few rows times a weight, split or not, with everything that can be fused into it, against float64."""

from __future__ import annotations

import pytest
import torch

from block_weights import draw_blocks, draw_rows
from inferplane_kernels_triton.skinny_matmul import MatmulConfig, MatmulWorkspace, skinny_matmul
from kernel_checks import MATRIX_DTYPES, assert_close, exact_in_fp8, gpu, poisoned

SMALL = MatmulConfig(rows=16, columns=32, num_stages=1)


def check(
    num_tokens: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
    config: MatmulConfig,
    *,
    has_bias: bool = False,
    gated: bool = False,
    quantized: bool = False,
    rounded: bool = False,
    block: tuple[int, int] | None = None,
    pdl: bool = False,
) -> None:
    x = torch.randn(num_tokens, in_features, device=device).to(dtype)
    wide_x, x_scale, scale = x.double(), None, None
    if rounded and block is not None:
        x, x_scale, wide_x = draw_rows(num_tokens, in_features, device)
    elif rounded:
        x = exact_in_fp8(num_tokens, in_features, device=device).to(torch.float8_e4m3fn)
        x_scale = torch.rand(num_tokens, 1, device=device) / 20
        wide_x = x.double() * x_scale.double()
    weight = torch.randn(out_features, in_features, device=device).to(dtype) / in_features**0.5
    numbers = weight.double()
    if block is not None:
        weight, scale, numbers = draw_blocks(out_features, in_features, *block, device)
    elif quantized:
        weight = exact_in_fp8(out_features, in_features, device=device).to(torch.float8_e4m3fn)
        scale = torch.rand(out_features, device=device) / 20 / in_features**0.5
        numbers = weight.double() * scale.double()[:, None]
    bias = torch.randn(out_features, device=device).to(dtype) if has_bias else None
    out = poisoned(num_tokens, out_features // 2 if gated else out_features, dtype=dtype, device=device)
    workspace = MatmulWorkspace.allocate(num_tokens, out_features, config.splits, device)
    workspace.partial.fill_(float("nan"))
    for _ in range(2 if config.splits > 1 else 1):
        skinny_matmul(
            x, weight, x_scale=x_scale, weight_scale=scale, bias=bias, gated=gated, out=out, workspace=workspace,
            config=config, pdl=pdl,
        )  # fmt: skip
    want = wide_x @ numbers.T
    if bias is not None:
        want = want + bias.double()
    if gated:
        gate, up = want.chunk(2, dim=-1)
        want = torch.nn.functional.silu(gate) * up
    assert_close(out, want)
    assert not workspace.arrived.any()


@pytest.mark.parametrize("dtype", [torch.float32, *MATRIX_DTYPES], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", [(1, 16, 32), (5, 40, 100), (33, 20, 64)], ids=str)
def test_skinny_matmul(shape: tuple[int, int, int], splits: int, dtype: torch.dtype, device: torch.device):
    check(*shape, dtype, device, MatmulConfig(rows=16, columns=32, splits=splits, num_stages=1))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(
    "fused",
    [
        {"has_bias": True},
        {"gated": True},
        {"quantized": True},
        {"gated": True, "has_bias": True, "quantized": True},
        {"quantized": True, "rounded": True},
        {"gated": True, "has_bias": True, "quantized": True, "rounded": True},
    ],
    ids=lambda fused: "+".join(fused),
)
def test_fused(fused: dict, splits: int, device: torch.device):
    config = MatmulConfig(rows=16, columns=32, splits=splits, num_stages=1)
    check(3, 40, 80, torch.float16, device, config, **fused)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(
    "fused", [{}, {"rounded": True}, {"gated": True, "rounded": True, "has_bias": True}], ids=str
)
@pytest.mark.parametrize("block", [(128, 128), (1, 128), (24, 256)], ids=str)
def test_blocks(block: tuple[int, int], fused: dict, splits: int, device: torch.device):
    config = MatmulConfig(rows=16, columns=256, splits=splits, num_stages=1)
    check(3, 72, 328, torch.float16, device, config, block=block, **fused)


def test_nothing_and_too_much(device: torch.device):
    weight = torch.zeros(16, 32, device=device)
    assert skinny_matmul(torch.zeros(0, 32, device=device), weight, config=SMALL).shape == (0, 16)
    with pytest.raises(ValueError, match="needs at most 64 rows of 32 columns"):
        skinny_matmul(torch.zeros(65, 32, device=device), weight)


@gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 16, 32, 64])
def test_at_real_shapes(num_tokens: int, pdl: bool, device: torch.device):
    for splits in (1, 4):
        config = MatmulConfig(splits=splits)
        check(num_tokens, 6144, 4096, torch.bfloat16, device, config, pdl=pdl)
        check(num_tokens, 28672, 4096, torch.bfloat16, device, config, gated=True, pdl=pdl)
        check(num_tokens, 4096, 14336, torch.bfloat16, device, config, quantized=True, pdl=pdl)
        check(num_tokens, 4096, 14336, torch.bfloat16, device, config, quantized=True, rounded=True, pdl=pdl)
        for shape in ((4096, 14336), (576, 7168), (7232, 1000)):
            options = {"block": (128, 128), "rounded": True, "pdl": pdl}
            check(num_tokens, *shape, torch.bfloat16, device, config, **options)
            check(num_tokens, *shape, torch.bfloat16, device, config, gated=True, **options)
        check(
            num_tokens,
            28672,
            4096,
            torch.bfloat16,
            device,
            config,
            quantized=True,
            rounded=True,
            gated=True,
            pdl=pdl,
        )


@gpu
@pytest.mark.parametrize("prefetch", [0, 1, 8])
def test_started_during_the_kernel_before_it(prefetch: int, device: torch.device):
    """What is asked for ahead reaches neither beyond the last row nor beyond the last column."""
    for splits in (1, 3):
        config = MatmulConfig(splits=splits, prefetch=prefetch)
        for shape in ((3, 100, 72), (32, 2048, 4096), (17, 320, 1000)):
            check(*shape, torch.bfloat16, device, config, pdl=True)
            check(*shape, torch.float16, device, config, quantized=True, gated=True, pdl=True)
