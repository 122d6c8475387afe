"""Products with quantized matrices against float64, at every level of instructions that this machine can run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.quantized import DTYPES, QuantizedProduct

pytestmark = pytest.mark.skipif(native.unavailable_reason() is not None, reason="no native kernels here")

LEVELS = [
    pytest.param(
        level, marks=pytest.mark.skipif(level not in native.levels(), reason=f"this machine has no {level}")
    )
    for level in native.LEVELS
]


def make(
    out_features: int,
    in_features: int,
    bits: int,
    group: int,
    *,
    has_minimum: bool = False,
    is_wide: bool = False,
    has_bias: bool = False,
    at: str | None = None,
) -> tuple[QuantizedProduct, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A random one, the float32 matrix that it stands for, its bias (or 0), and the largest magnitude that the codes of
    each row could have."""
    num_groups, zero = -(-in_features // group), 0 if has_minimum else 2 ** (bits - 1)
    codes = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8)
    scale = torch.rand(out_features, num_groups) * 0.01 + 0.001
    minimum = torch.randn(out_features, num_groups) * 0.05 if has_minimum else None
    if not is_wide:
        scale, minimum = scale.half(), None if minimum is None else minimum.half()
    bias = torch.randn(out_features) if has_bias else None

    def spread(blocks: torch.Tensor) -> torch.Tensor:
        return blocks.float().repeat_interleave(group, 1)[:, :in_features]

    weight = (codes.float() - zero) * spread(scale)
    if minimum is not None:
        weight += spread(minimum)
    if bits == 4:
        even = torch.nn.functional.pad(codes, (0, in_features % 2))
        codes = even[:, ::2] | (even[:, 1::2] << 4)
    product = QuantizedProduct(
        codes, scale, minimum, bias, in_features=in_features, bits=bits, zero=zero, group=group, at=at
    )
    ends = torch.stack([scale.float() * (code - zero) for code in (0, 2**bits - 1)])
    reach = (ends if minimum is None else ends + minimum.float()).abs().amax((0, 2))
    return product, weight, torch.zeros(out_features) if bias is None else bias, reach


def check(
    product: QuantizedProduct,
    weight: torch.Tensor,
    bias: torch.Tensor,
    reach: torch.Tensor,
    num_rows: int,
    dtype: torch.dtype,
) -> None:
    # of very unlike sizes, as activations are
    x = (torch.randn(num_rows, weight.shape[1]) * torch.rand(num_rows, weight.shape[1]).pow(8)).to(dtype)
    want = x.double() @ weight.double().T + bias.double()
    got = product(x)
    assert got.dtype == dtype
    assert got.shape == want.shape
    # of both, 16 bits of the largest in a row are kept, and products of their low bytes are left out
    x_step = x.double().abs().amax(1, keepdim=True) * 2.0**-15
    weight_step = reach.double() / 30000
    error = x_step * weight.double().abs().sum(1) + x.double().abs().sum(1, keepdim=True) * weight_step
    error += weight.shape[1] * 2.0**14 * x_step * weight_step
    bound = error + want.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-18) + 1e-30
    assert bool(((got.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("at", LEVELS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_products_of_any_shape(at: str, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 30), "seed"))
    flag = st.booleans()
    product, weight, bias, reach = make(
        data.draw(st.integers(1, 300), "out_features"),
        data.draw(st.integers(1, 300), "in_features"),
        data.draw(st.sampled_from([4, 8]), "bits"),
        data.draw(st.sampled_from([16, 32, 48, 64, 128, 320]), "group"),
        has_minimum=data.draw(flag, "has_minimum"),
        is_wide=data.draw(flag, "is_wide"),
        has_bias=data.draw(flag, "has_bias"),
        at=at,
    )
    assert torch.equal(product.rows(torch.arange(len(weight)), torch.float32), weight)
    check(
        product,
        weight,
        bias,
        reach,
        data.draw(st.sampled_from([0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 33, 70]), "rows"),
        data.draw(st.sampled_from(DTYPES), "dtype"),
    )


@pytest.mark.parametrize("at", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 16, 1000])
def test_products_of_a_model_s_size(at: str, num_rows: int, dtype: torch.dtype) -> None:
    check(*make(576, 1536, 4, 32, has_minimum=True, at=at), num_rows, dtype)


@pytest.mark.parametrize("at", LEVELS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [3, 40])
def test_float32_activations_lose_next_to_nothing(at: str, bits: int, num_rows: int) -> None:
    """bfloat16 would be off by 2e-3; activations of 8 bits for each 32, which llama.cpp has, by 6e-3."""
    product, weight, _, _ = make(64, 1536, bits, 32, has_minimum=bits == 4, at=at)
    x = torch.randn(num_rows, 1536)
    want = x.double() @ weight.double().T
    assert (product(x).double() - want).norm() < 1e-4 * want.norm()


@pytest.mark.parametrize("at", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_few_codes_around_a_minimum(at: str, num_rows: int) -> None:
    """Half a scale off: numbers of either sign are equally large, so that a step of codes is most of the largest."""
    codes = torch.randint(126, 130, (50, 96), dtype=torch.uint8)
    scale = (torch.rand(50, 3) + 0.5).half()
    product = QuantizedProduct(
        codes, scale, scale / 2, None, in_features=96, bits=8, zero=128, group=32, at=at
    )
    weight = (codes.float() - 127.5) * scale.float().repeat_interleave(32, 1)
    x = torch.randn(num_rows, 96)
    want = x.double() @ weight.double().T
    assert (product(x).double() - want).norm() < 1e-3 * want.norm()


@pytest.mark.parametrize("at", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 50])
@pytest.mark.parametrize("out_features", [64, 96, 70])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_before_and_gate_behind(
    at: str, dtype: torch.dtype, num_rows: int, out_features: int, has_residual: bool
) -> None:
    product, weight, bias, _ = make(out_features, 160, 4, 32, has_minimum=True, has_bias=True, at=at)
    x, norm = torch.randn(num_rows, 160).to(dtype), torch.rand(160).to(dtype)
    residual = torch.randn(num_rows, 160).to(dtype) if has_residual else None
    total = x if residual is None else x + residual
    wide = total.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.double()
    plain = normed @ weight.double().T + bias.double()
    gate, value = plain.chunk(2, dim=-1)
    tolerance = {"rtol": 0.03, "atol": 0.03} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
    for is_gated, want in ((False, plain), (True, torch.nn.functional.silu(gate) * value)):
        kept = None if residual is None else residual.clone()
        got, summed = product.after_add_rms_norm(x.clone(), kept, norm, 1e-5, is_gated=is_gated)
        assert (got.dtype, got.shape) == (dtype, want.shape)
        assert torch.equal(summed, total)
        torch.testing.assert_close(got.double(), want, **tolerance)
    gate, value = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * value
    torch.testing.assert_close(product.silu_and_mul(x).double(), want, **tolerance)


@pytest.mark.parametrize("at", LEVELS)
@pytest.mark.parametrize("num_rows", [2, 20])
def test_an_outlier_costs_its_own_row_alone_some_accuracy(at: str, num_rows: int) -> None:
    product, weight, _, _ = make(64, 512, 4, 32, has_minimum=True, at=at)
    x = torch.randn(num_rows, 512)
    x[0, 100] = 1000
    want = x.double() @ weight.double().T
    error = (product(x).double() - want).norm(dim=1) / want.norm(dim=1)
    assert error[0] < 1e-3
    assert bool((error[1:] < 2e-4).all())


@pytest.mark.parametrize("at", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 20])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_so_in_its_row_alone(
    at: str, num_rows: int, bad: float, dtype: torch.dtype
) -> None:
    product, weight, _, _ = make(40, 96, 4, 32, at=at)
    x = torch.randn(num_rows + 1, 96, dtype=dtype)
    x[0, 50] = bad
    got = product(x)
    assert not got[0].isfinite().any()
    torch.testing.assert_close(got[1:].double(), x[1:].double() @ weight.double().T, rtol=0.01, atol=0.02)


@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_rows_that_lie_in_any_way(num_rows: int) -> None:
    product = make(64, 96, 4, 32)[0]
    x = torch.randn(num_rows, 96).bfloat16()
    want = product(x)
    wider = torch.cat([x.flip(1), x, x.flip(1)], dim=1)
    assert torch.equal(product(wider[:, 96:192]), want)
    assert torch.equal(product(x.T.contiguous().T), want)


def test_rows_are_rounded_once() -> None:
    product, weight, _, _ = make(50, 70, 8, 32)
    index = torch.tensor([49, 0, 7, 7])
    assert torch.equal(product.rows(index), weight[index].bfloat16())
    assert product.rows(index[:0]).shape == (0, 70)


def test_scales_of_half_precision_cost_half() -> None:
    narrow, wide = make(64, 64, 4, 32)[0], make(64, 64, 4, 32, is_wide=True)[0]
    assert narrow.num_bytes == 64 * 64 * (4 + 16 / 32) / 8
    assert wide.num_bytes == 64 * 64 * (4 + 32 / 32) / 8


def test_a_group_that_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16, not 4 in groups of 24"):
        make(8, 48, 4, 24)
