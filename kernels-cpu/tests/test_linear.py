"""Products with packed and with half-precision weights, against float64."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_cpu import linear
from inferplane_kernels_cpu.linear import PackedLinear, WidenedLinear, can_pack

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 3, 8, 65]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def check(kernel, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    multiply = kernel(weight, bias)
    kept = weight.clone()
    for rows in ROWS:
        x = torch.randn(rows, weight.shape[1]).to(weight.dtype)
        want = x.double() @ kept.double().T + (0 if bias is None else bias.double())
        got = multiply(x)
        assert got.dtype == weight.dtype
        assert got.shape == want.shape
        assert (got.double() - want).abs().max() <= TOLERANCES[weight.dtype] * want.abs().max()
        assert multiply(x[:0]).shape == (0, weight.shape[0])
    assert torch.equal(weight, kept)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (33, 17), (1, 5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed(dtype: torch.dtype, out_features: int, in_features: int, has_bias: bool) -> None:
    if not can_pack(dtype):
        pytest.skip(f"torch packs no {dtype} weights on this machine")
    weight = torch.randn(out_features, in_features).to(dtype)
    check(PackedLinear, weight, torch.randn(out_features).to(dtype) if has_bias else None)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (33, 17), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_widened(
    dtype: torch.dtype, out_features: int, in_features: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "TILE_BYTES", 1 << 11)  # several tiles, the last not full
    weight = torch.randn(out_features, in_features).to(dtype)
    check(WidenedLinear, weight, torch.randn(out_features).to(dtype) if has_bias else None)


def test_a_weight_that_is_a_slice_of_another() -> None:
    whole = torch.randn(80, 100)
    check(PackedLinear, whole[10:50, 20:90], None)
    check(WidenedLinear, whole.to(torch.bfloat16)[10:50, 20:90], None)


def test_float32_packs_everywhere() -> None:
    """Without it the platform falls back to torch's plain product, at about half the speed."""
    assert can_pack(torch.float32)
