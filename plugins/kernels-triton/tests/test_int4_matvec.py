"""A row times a 4-bit weight, with everything that can be fused into it, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inferplane_kernels_triton.int4_fixed_matvec import Int4FixedMatvecConfig, int4_fixed_matvec
from inferplane_kernels_triton.int4_matvec import Int4MatvecConfig, int4_matvec
from inferplane_kernels_triton.matvec import NormBefore
from int4_weights import drawn_int4
from kernel_checks import assert_close, gpu
from row_product import EPS, RowProduct

SMALL = {
    int4_matvec: Int4MatvecConfig(rows=4, blocks=2),
    int4_fixed_matvec: Int4FixedMatvecConfig(rows=2, times=2, warps_for_32=4),
}
Matvec = Callable[..., torch.Tensor]
both = pytest.mark.parametrize("matvec", [int4_matvec, int4_fixed_matvec])
"""Of the kernels for one row."""


def check(
    matvec: Matvec,
    out_features: int,
    in_features: int,
    group: int | None,
    dtype: torch.dtype,
    device: torch.device,
    config: Any,
    *,
    has_zero: bool = False,
    has_offset: bool = False,
    is_e2m1: bool = False,
    pdl: bool = False,
    **fused: bool,
) -> None:
    torch.manual_seed(0)
    weight, numbers = drawn_int4(
        out_features, in_features, group, device, has_zero=has_zero, has_offset=has_offset, is_e2m1=is_e2m1
    )
    row = RowProduct.draw(out_features, in_features, dtype, device, **fused)
    assert matvec(row.x, weight, config=config, pdl=pdl, **row.options) is row.out
    row.check(numbers)


@both
@pytest.mark.parametrize("group", [16, 64, 128, 256, None])
def test_matvec(matvec: Matvec, group: int | None, device: torch.device):
    check(matvec, 6, 384, group, torch.float16, device, SMALL[matvec])


@both
def test_bfloat16(matvec: Matvec, device: torch.device):
    check(matvec, 4, 384, 32, torch.bfloat16, device, SMALL[matvec])


@both
@pytest.mark.parametrize(("in_features", "group"), [(96, 32), (200, 64), (130, 128), (7, None), (400, 16)])
def test_rows_that_end_within_a_block_or_a_group(
    matvec: Matvec, in_features: int, group: int | None, device: torch.device
):
    check(matvec, 6, in_features, group, torch.float16, device, SMALL[matvec], has_zero=True, has_norm=True)


@both
@pytest.mark.parametrize(
    "fused",
    [
        {"has_bias": True},
        {"has_zero": True},
        {"has_offset": True},
        {"gated": True},
        {"has_norm": True},
        {"has_norm": True, "has_residual": True, "has_zero": True, "has_bias": True},
        {
            "has_norm": True, "has_residual": True, "has_zero": True, "has_offset": True, "gated": True,
            "has_bias": True,
        },
    ],
    ids=lambda fused: "+".join(fused),
)  # fmt: skip
@pytest.mark.parametrize("group", [32, 128])
def test_fused(matvec: Matvec, group: int, fused: dict, device: torch.device):
    check(matvec, 8, 256, group, torch.float16, device, SMALL[matvec], **fused)


@pytest.mark.parametrize(
    "fused", [{}, {"has_norm": True, "has_residual": True, "gated": True, "has_bias": True}]
)
@pytest.mark.parametrize(("in_features", "group"), [(256, 32), (200, 64), (96, 16), (7, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_e2m1(dtype: torch.dtype, in_features: int, group: int | None, fused: dict, device: torch.device):
    check(int4_matvec, 8, in_features, group, dtype, device, SMALL[int4_matvec], is_e2m1=True, **fused)


def test_whole_numbers_are_not_e2m1(device: torch.device):
    weight, _ = drawn_int4(4, 128, 32, device, is_e2m1=True)
    with pytest.raises(ValueError, match="no whole numbers; use int4_matvec"):
        int4_fixed_matvec(torch.zeros(1, 128, device=device), weight)


def test_sums_are_as_exact_as_float32(device: torch.device):
    """The ones in front of the codes, up to 256 times as large, leave no trace beyond float32's."""
    torch.manual_seed(0)
    x = torch.randn(1, 2048, device=device)
    weight, numbers = drawn_int4(4, 2048, 128, device)
    assert_close(int4_matvec(x, weight, config=SMALL[int4_matvec]), x.double() @ numbers.T, 3e-5)


def test_fixed_point_is_finer_than_half_precision(device: torch.device):
    """Also where a block's numbers are of very different sizes."""
    torch.manual_seed(0)
    x = torch.randn(1, 512, device=device)
    x[0, ::50] *= 30
    weight, numbers = drawn_int4(4, 512, 128, device)
    assert_close(int4_fixed_matvec(x, weight, config=SMALL[int4_fixed_matvec]), x.double() @ numbers.T, 2e-4)
    nothing = int4_fixed_matvec(torch.zeros_like(x), weight)
    assert not nothing.any()


@both
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_a_number_stays_so(matvec: Matvec, wrong: float, device: torch.device):
    """A broken activation ends in an error, not in likely tokens."""
    torch.manual_seed(0)
    weight, _ = drawn_int4(4, 512, 128, device)
    for place in (0, 77, 300, 511):
        x = torch.randn(1, 512, device=device)
        x[0, place] = wrong
        norm = NormBefore(torch.ones(512, device=device), EPS)
        for before in (None, norm):
            assert not matvec(x, weight, norm=before, config=SMALL[matvec]).isfinite().any()


@both
def test_other_rows_and_columns(matvec: Matvec):
    weight, _ = drawn_int4(4, 256, 128, torch.device("cpu"))
    with pytest.raises(ValueError, match="x has 2 rows, needs 1"):
        matvec(torch.zeros(2, 256), weight)
    with pytest.raises(ValueError, match="x has 128 columns, needs 256"):
        matvec(torch.zeros(1, 128), weight)


@gpu
@both
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_at_real_shapes(matvec: Matvec, group: int, pdl: bool, device: torch.device):
    config = type(SMALL[matvec])()
    if matvec is int4_matvec:
        check(matvec, 6144, 4096, group, torch.bfloat16, device, config, has_norm=True, is_e2m1=True, pdl=pdl)
    everything = {"has_norm": True, "has_residual": True, "pdl": pdl}
    for has_zero in (False, True):
        check(matvec, 6144, 4096, group, torch.bfloat16, device, config, has_zero=has_zero, **everything)
        check(
            matvec,
            28672,
            4096,
            group,
            torch.bfloat16,
            device,
            config,
            gated=True,
            has_zero=has_zero,
            **everything,
        )
        check(matvec, 4096, 14336, group, torch.bfloat16, device, config, has_zero=has_zero, pdl=pdl)
