"""4-bit weights written out: the numbers that float64 says, exactly, and what cannot be packed."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_triton.int4_dequantize import DequantizeConfig, dequantize_int4
from inferplane_kernels_triton.int4_matrix import Int4Matrix
from int4_weights import drawn_int4
from kernel_checks import MATRIX_DTYPES, gpu, poisoned

SMALL = DequantizeConfig(rows=4, blocks=2)


def check(shape: tuple[int, int], group: int | None, device: torch.device, **parts: bool) -> None:
    """Codes times scales of half precision are exact in float32, and with an offset nearly so."""
    weight, want = drawn_int4(*shape, group, device, **parts)
    out = poisoned(*shape, dtype=torch.float32, device=device)
    assert dequantize_int4(weight, out, config=SMALL) is out
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-6 if parts.get("has_offset") else 0)
    for dtype in MATRIX_DTYPES:
        half = dequantize_int4(weight, poisoned(*shape, dtype=dtype, device=device))
        assert torch.equal(half, out.to(dtype))


@pytest.mark.parametrize(
    "parts",
    [{}, {"has_zero": True}, {"has_offset": True}, {"is_e2m1": True}],
    ids=lambda each: "+".join(each),
)
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, None])
def test_dequantize(group: int | None, parts: dict, device: torch.device):
    torch.manual_seed(0)
    check((5, 384), group, device, **parts)


@pytest.mark.parametrize(("in_features", "group"), [(96, 32), (200, 64), (130, 128), (7, None), (33, 16)])
def test_rows_that_end_within_a_block_or_a_group(in_features: int, group: int | None, device: torch.device):
    torch.manual_seed(0)
    check((9, in_features), group, device, has_zero=True)


def test_where_columns_lie(device: torch.device):
    codes = torch.arange(128, dtype=torch.uint8) % 16
    packed = (codes[::2] | (codes[1::2] << 4)).unsqueeze(0).to(device)
    words = Int4Matrix.pack(packed, torch.ones(1, 1, device=device), 128, 128).words[0].tolist()
    for column, code in enumerate(codes.tolist()):
        place = column // 16
        assert words[column % 16] >> (8 * (place % 4) + 4 * (place // 4)) & 15 == code


def test_what_cannot_be_packed():
    codes, scale = torch.zeros(4, 96, dtype=torch.uint8), torch.ones(4, 2)
    with pytest.raises(
        ValueError, match="groups should be of 16, 32, 64 or a multiple of 128 columns, not 96"
    ):
        Int4Matrix.pack(codes, scale, 192, 96)
    with pytest.raises(ValueError, match=r"scale has shape \(4, 2\), needs \(4, 3\)"):
        Int4Matrix.pack(codes, scale, 192, 64)
    weight = Int4Matrix.pack(codes, scale, 192, 128)
    with pytest.raises(ValueError, match=r"out: needs to be contiguous, of shape \(4, 192\)"):
        dequantize_int4(weight, torch.zeros(4, 128))


@gpu
@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("group", [32, 128])
def test_at_real_shapes(group: int, has_zero: bool, device: torch.device):
    torch.manual_seed(0)
    for shape in ((6144, 4096), (4096, 14336)):
        weight, want = drawn_int4(*shape, group, device, has_zero=has_zero)
        out = poisoned(*shape, dtype=torch.bfloat16, device=device)
        assert torch.equal(dequantize_int4(weight, out, pdl=True), want.bfloat16())


def test_every_number_of_e2m1_and_exponents_of_all_sizes(device: torch.device):
    """As published (OCP MX 1.0): 16 codes in each of groups whose scales are the smallest power of two, the largest…"""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    packed = torch.arange(16, dtype=torch.uint8).repeat(8).view(1, 128)
    packed = (packed[:, ::2] | (packed[:, 1::2] << 4)).to(device)
    exponents = torch.tensor([[0, 1, 127, 200, 126, 128, 100, 252]], dtype=torch.uint8, device=device)
    scale = exponents.view(torch.float8_e8m0fnu)
    weight = Int4Matrix.pack(packed, scale, 128, 16, is_e2m1=True)
    out = dequantize_int4(weight, poisoned(1, 128, dtype=torch.float32, device=device), config=SMALL)
    codes = torch.tensor([*numbers, *(-each for each in numbers)], dtype=torch.float64, device=device)
    want = torch.exp2(exponents.double() - 127).view(8, 1) * codes
    assert torch.equal(out.double().view(8, 16), want)
    with pytest.raises(ValueError, match="no zero points and no offsets"):
        Int4Matrix.pack(packed, scale, 128, 16, zero=exponents, is_e2m1=True)
