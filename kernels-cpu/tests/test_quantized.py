"""Products with quantized matrices against float64, at every level of instructions that this machine can run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.quantized import QuantizedProduct

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
) -> tuple[QuantizedProduct, torch.Tensor, torch.Tensor]:
    """A random one, the float32 matrix that it stands for, and its bias (or 0)."""
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
    return product, weight, torch.zeros(out_features) if bias is None else bias


def check(product: QuantizedProduct, weight: torch.Tensor, bias: torch.Tensor, num_rows: int) -> None:
    # of very unlike sizes, as activations are
    x = (torch.randn(num_rows, weight.shape[1]) * torch.rand(num_rows, weight.shape[1]).pow(8)).bfloat16()
    want = x.double() @ weight.double().T + bias.double()
    got = product(x)
    assert got.dtype == torch.bfloat16
    assert got.shape == want.shape
    # the result is rounded once; for many rows the weights are, for few the activations, by the largest of their unit
    padded = torch.nn.functional.pad(x.double().abs(), (0, -weight.shape[1] % 32))
    largest = padded.unflatten(1, (-1, 32)).amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    size = x.double().abs() * 2.0**-8 + largest[:, : weight.shape[1]] * 2.0**-15
    bound = want.abs() * 2.0**-8 + size @ weight.double().abs().T + 1e-30
    assert bool(((got.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("at", LEVELS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_products_of_any_shape(at: str, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 30), "seed"))
    flag = st.booleans()
    product, weight, bias = make(
        data.draw(st.integers(1, 130), "out_features"),
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
        data.draw(st.sampled_from([0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 33, 70]), "rows"),
    )


@pytest.mark.parametrize("at", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 4, 16, 1000])
def test_products_of_a_model_s_size(at: str, num_rows: int) -> None:
    product, weight, bias = make(576, 1536, 4, 32, has_minimum=True, at=at)
    check(product, weight, bias, num_rows)


@pytest.mark.parametrize("at", LEVELS)
def test_few_rows_are_multiplied_by_the_exact_matrix(at: str) -> None:
    """Activations are in 16-bit fixed point, and nothing else is rounded before the sum."""
    product, weight, _ = make(64, 256, 4, 32, has_minimum=True, at=at)
    x = torch.randn(3, 256).bfloat16()
    want = x.double() @ weight.double().T
    error = (product(x).double() - want).abs() - want.abs() * 2.0**-8
    assert error.max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("at", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 20])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_so_in_its_row_alone(at: str, num_rows: int, bad: float) -> None:
    product, weight, _ = make(40, 96, 4, 32, at=at)
    x = torch.randn(num_rows + 1, 96).bfloat16()
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
    product, weight, _ = make(50, 70, 8, 32)
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
