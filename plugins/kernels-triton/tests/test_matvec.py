"""A row times a weight, with everything that can be fused into it, against float64."""

from __future__ import annotations

import pytest
import torch

from block_weights import draw_blocks
from inferplane_kernels_triton.block_scale import BlockScale, WeightScale
from inferplane_kernels_triton.matvec import MatvecConfig, NormBefore, matvec
from kernel_checks import assert_close, exact_in_fp8, gpu
from row_product import EPS, RowProduct

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = MatvecConfig(rows=4, columns=64)


def check(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
    config: MatvecConfig,
    *,
    quantized: bool = False,
    block: tuple[int, int] | None = None,
    pdl: bool = False,
    **fused: bool,
) -> None:
    scale: WeightScale = None
    weight = torch.randn(out_features, in_features, device=device).to(dtype)
    numbers = weight.double()
    if block is not None:
        weight, scale, numbers = draw_blocks(out_features, in_features, *block, device)
    elif quantized:
        weight = exact_in_fp8(out_features, in_features, device=device).to(torch.float8_e4m3fn)
        scale = torch.rand(out_features, device=device) / 10
        numbers = weight.double() * scale.double()[:, None]
    row = RowProduct.draw(out_features, in_features, dtype, device, **fused)
    assert matvec(row.x, weight, weight_scale=scale, config=config, pdl=pdl, **row.options) is row.out
    row.check(numbers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(8, 64), (9, 200), (3, 40)])
def test_matvec(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device):
    check(out_features, in_features, dtype, device, SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fused",
    [
        {"has_bias": True},
        {"has_norm": True},
        {"has_norm": True, "has_residual": True},
        {"gated": True},
        {"gated": True, "has_norm": True, "has_residual": True, "has_bias": True},
        {"quantized": True},
        {"quantized": True, "gated": True, "has_norm": True, "has_residual": True},
    ],
    ids=lambda fused: "+".join(fused),
)
def test_fused(fused: dict, dtype: torch.dtype, device: torch.device):
    check(12, 100, dtype, device, SMALL, **fused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "fused", [{}, {"has_bias": True}, {"gated": True, "has_norm": True, "has_residual": True}], ids=str
)
@pytest.mark.parametrize("block", [(128, 128), (1, 32), (6, 48)], ids=str)
def test_blocks(block: tuple[int, int], fused: dict, dtype: torch.dtype, device: torch.device):
    check(20, 200, dtype, device, SMALL, block=block, **fused)
    check(10, 8, dtype, device, SMALL, block=block, **fused)


def test_rows_of_a_wider_weight(device: torch.device):
    whole = torch.randn(10, 96, device=device)
    x = torch.randn(1, 64, device=device)
    got = matvec(x, whole[1:9, 16:80], config=SMALL)
    assert_close(got, x.double() @ whole[1:9, 16:80].double().T)


def test_what_does_not_fit_is_refused(device: torch.device):
    weight = torch.zeros(8, 64, device=device)
    with pytest.raises(ValueError, match=r"x has shape \(2, 64\), needs \(1, 64\)"):
        matvec(torch.zeros(2, 64, device=device), weight)
    x = torch.zeros(1, 64, device=device)
    with pytest.raises(ValueError, match="residual and residual_out come together"):
        matvec(x, weight, norm=NormBefore(weight[0], EPS, x))
    with pytest.raises(ValueError, match="of a multiple of 16 columns, not 8"):
        matvec(x, weight, weight_scale=BlockScale(torch.ones(1, 8, device=device), 8, 8))


@gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (128256, 4096)], ids=str)
def test_at_real_shapes(shape: tuple[int, int], pdl: bool, device: torch.device):
    config = MatvecConfig()
    check(*shape, torch.bfloat16, device, config, pdl=pdl)
    check(*shape, torch.bfloat16, device, config, pdl=pdl, quantized=True)
    check(*shape, torch.bfloat16, device, config, pdl=pdl, block=(128, 128))
    check(*shape, torch.bfloat16, device, config, pdl=pdl, has_norm=True, has_residual=True)


@gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_gated_at_real_shapes(pdl: bool, device: torch.device):
    config = MatvecConfig()
    fused = {"gated": True, "has_norm": True, "has_residual": True}
    check(28672, 4096, torch.bfloat16, device, config, pdl=pdl, **fused)
    check(28672, 4096, torch.bfloat16, device, config, pdl=pdl, block=(128, 128), **fused)
    check(1152, 7168, torch.bfloat16, device, config, pdl=pdl, block=(128, 128), **fused)
