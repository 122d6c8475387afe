"""A row times a weight in fp8, with everything that can be fused into it, against float64."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_triton.fp8_matvec import Fp8MatvecConfig, fp8_matvec
from kernel_checks import exact_in_fp8, gpu
from row_product import RowProduct

SMALL = Fp8MatvecConfig(rows=2, num_warps=1)


def check(
    out_features: int,
    in_features: int,
    device: torch.device,
    config: Fp8MatvecConfig = SMALL,
    *,
    times_x: float = 1.0,
    pdl: bool = False,
    **fused: bool,
) -> None:
    weight = exact_in_fp8(out_features, in_features, device=device).to(torch.float8_e4m3fn)
    scale = torch.rand(out_features, device=device) / 10
    row = RowProduct.draw(out_features, in_features, torch.bfloat16, device, **fused)
    row.x.mul_(times_x)
    assert fp8_matvec(row.x, weight, scale, config=config, pdl=pdl, **row.options) is row.out
    row.check(weight.double() * scale.double()[:, None])


@pytest.mark.parametrize(
    "config", [SMALL, Fp8MatvecConfig(rows=1, times=3, num_warps=1)], ids=["one", "times"]
)
@pytest.mark.parametrize(("out_features", "in_features"), [(8, 64), (9, 1040), (3, 512)])
def test_fp8_matvec(out_features: int, in_features: int, config: Fp8MatvecConfig, device: torch.device):
    check(out_features, in_features, device, config)


@pytest.mark.parametrize(
    "fused",
    [
        {"has_bias": True},
        {"has_norm": True},
        {"has_norm": True, "has_residual": True},
        {"gated": True},
        {"gated": True, "has_norm": True, "has_residual": True, "has_bias": True},
    ],
    ids=lambda fused: "+".join(fused),
)
def test_fused(fused: dict, device: torch.device):
    check(12, 112, device, **fused)


@pytest.mark.parametrize("times_x", [1e-12, 1e-3, 1e4, 1e12])
def test_x_of_any_size(times_x: float, device: torch.device):
    check(8, 1040, device, times_x=times_x)


def test_the_largest_sums_stay_finite(device: torch.device):
    """A warp that had more than 4,096 columns would pass the largest number of half precision."""
    weight = torch.full((2, 5120), 448.0, device=device).to(torch.float8_e4m3fn)
    x = torch.ones(1, 5120, dtype=torch.bfloat16, device=device)
    got = fp8_matvec(x, weight, torch.ones(2, device=device), config=SMALL)
    assert torch.allclose(got.float(), torch.full((1, 2), 448.0 * 5120, device=device), rtol=1e-2)


def test_a_row_of_zeros(device: torch.device):
    weight = exact_in_fp8(4, 64, device=device).to(torch.float8_e4m3fn)
    got = fp8_matvec(
        torch.zeros(1, 64, dtype=torch.bfloat16, device=device), weight, torch.ones(4, device=device)
    )
    assert torch.equal(got, torch.zeros_like(got))


def test_one_large_number_among_small_ones(device: torch.device):
    """As in the activations of real models: the others keep their digits."""
    weight = torch.ones(4, 64, device=device).to(torch.float8_e4m3fn)
    weight[:, 3] = 0.0
    x = torch.full((1, 64), 0.01, dtype=torch.bfloat16, device=device)
    x[0, 3] = 3000.0
    got = fp8_matvec(x, weight, torch.ones(4, device=device), config=SMALL)
    want = 63 * x[0, 0].double()
    assert torch.allclose(got.double(), want.expand(1, 4), rtol=1e-2)


def test_what_is_not_a_number_stays(device: torch.device):
    weight = torch.ones(4, 64, device=device).to(torch.float8_e4m3fn)
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    x[0, 5] = float("nan")
    assert fp8_matvec(x, weight, torch.ones(4, device=device), config=SMALL).isnan().all()


def test_what_does_not_fit_is_refused(device: torch.device):
    x, scale = torch.zeros(1, 64, dtype=torch.bfloat16, device=device), torch.ones(8, device=device)
    weight = torch.zeros(8, 64, device=device).to(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match=r"x is torch.bfloat16 of shape \(2, 64\), needs bfloat16 of \(1, 64\)"
    ):
        fp8_matvec(x.expand(2, 64), weight, scale)
    with pytest.raises(ValueError, match=r"x is torch.float32"):
        fp8_matvec(x.float(), weight, scale)
    with pytest.raises(ValueError, match="weight has 24 columns, needs a multiple of 16 up to 16384"):
        fp8_matvec(x[:, :24], weight[:, :24], scale)


@gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (128256, 4096)], ids=str)
def test_at_real_shapes(shape: tuple[int, int], pdl: bool, device: torch.device):
    for config in (Fp8MatvecConfig(), Fp8MatvecConfig(rows=2, times=4, num_warps=8)):
        check(*shape, device, config, pdl=pdl)
        check(*shape, device, config, pdl=pdl, has_norm=True, has_residual=True)


@gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_gated_at_real_shapes(pdl: bool, device: torch.device):
    for config in (Fp8MatvecConfig(), Fp8MatvecConfig(rows=4, times=2, num_warps=2)):
        check(28672, 4096, device, config, pdl=pdl, gated=True, has_norm=True, has_residual=True)
