"""Products by weights of up to four bits against the dequantized weight in float64."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch

from inferplane.api import CapabilitySet, DeviceDescriptor
from inferplane.api.linear import FusedMultiply, LinearShape
from inferplane.api.ops import add_rms_norm, silu_and_mul
from inferplane.api.quant import Granularity, Number, QuantizedWeight, QuantScheme
from inferplane_torch_accelerator import int4_linear
from inferplane_torch_accelerator.int4_multiply import space_for
from inferplane_torch_accelerator.launch import Launch

OUT, IN = 16, 128
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Int4Linear(int4_linear.Int4Linear):
    """As a platform names it."""

    name = "acme_int4"
    launch = Launch("nvidia")


SCHEME = QuantScheme(Number.INT, 4, Granularity(1, 32), torch.float16)


def drawn(
    device: torch.device, scheme: QuantScheme = SCHEME, out_features: int = OUT, in_features: int = IN
) -> QuantizedWeight:
    torch.manual_seed(0)
    shape = scheme.granularity.scale_shape(out_features, in_features)
    zero = None if scheme.is_symmetric else torch.randint(-8, 8, shape, dtype=torch.int8).to(device)
    scale = torch.rand(shape) / 100 + 1e-3
    if scheme.scale_dtype == torch.float8_e8m0fnu:
        scale = torch.exp2(torch.randint(-9, -5, shape).float())
    return QuantizedWeight(
        scheme,
        out_features,
        in_features,
        torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8).to(device),
        scale.to(scheme.scale_dtype).to(device),
        zero,
    )


def assert_near(got: torch.Tensor, want: torch.Tensor, *, is_gated: bool = False) -> None:
    """Of several rows the gate and its product are rounded on the way."""
    error = (got.double() - want).norm() / want.norm()
    assert error < TOLERANCES[got.dtype] * (2 if is_gated else 1), error


def check(weight: QuantizedWeight, num_rows: int, *, has_bias: bool = False) -> None:
    device = weight.codes.device
    # Triton's interpreter rounds bfloat16 to zero
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    bias = torch.randn(weight.out_features).to(device, dtype) if has_bias else None
    multiply = Int4Linear.prepare(weight, bias)
    x, residual = (torch.randn(num_rows, weight.in_features).to(device, dtype) for _ in range(2))
    wide = weight.dequantize(torch.float32).double()

    def product(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(y, wide, None if bias is None else bias.double())

    assert_near(multiply(x), product(x.double()))
    assert_near(multiply(x.T.contiguous().T), product(x.double()))
    if not isinstance(multiply, FusedMultiply):
        assert weight.column_group is not None
        return
    assert_near(multiply.silu_and_mul(x), silu_and_mul(product(x.double())), is_gated=True)
    norm = torch.rand(weight.in_features).to(device, dtype) + 0.5
    after = product(add_rms_norm(x.double(), residual.double(), norm.double(), 1e-5)[0])
    for is_gated in (False, True):
        got, total = multiply.after_add_rms_norm(x.clone(), residual.clone(), norm, 1e-5, is_gated=is_gated)
        assert_near(got, silu_and_mul(after) if is_gated else after, is_gated=is_gated)
        assert_near(total, x.double() + residual.double())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 65])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_products(is_symmetric: bool, num_rows: int, has_bias: bool, device: torch.device) -> None:
    check(drawn(device, replace(SCHEME, is_symmetric=is_symmetric)), num_rows, has_bias=has_bias)


@pytest.mark.parametrize(
    "granularity", [Granularity(1, 64), Granularity(1, None), Granularity(None, None)], ids=str
)
def test_granularities(granularity: Granularity, device: torch.device) -> None:
    for num_rows in (1, 2):
        check(drawn(device, replace(SCHEME, granularity=granularity, bits=3)), num_rows)


MXFP4 = QuantScheme(Number.FP4, 4, Granularity(1, 32), torch.float8_e8m0fnu)
NVFP4 = QuantScheme(Number.FP4, 4, Granularity(1, 16), torch.float32)


@pytest.mark.parametrize("num_rows", [1, 3, 65])
@pytest.mark.parametrize("scheme", [MXFP4, NVFP4], ids=str)
def test_e2m1(scheme: QuantScheme, num_rows: int, device: torch.device) -> None:
    check(drawn(device, scheme), num_rows, has_bias=True)


@pytest.mark.parametrize("is_even", [True, False])
def test_act_order(is_even: bool, device: torch.device) -> None:
    """Whole groups in any order; or, as a rank's part of a matrix has them, what there happens to be of each."""
    torch.manual_seed(0)
    whole = torch.arange(IN) // 32
    groups = whole[torch.randperm(IN)] if is_even else (whole[torch.randperm(IN)] // 2 * 2 + whole // 2) % 4
    weight = drawn(device, replace(SCHEME, is_symmetric=False, has_column_order=True))
    weight = replace(weight, column_group=groups.int().to(device))
    assert (torch.bincount(groups) == 32).all() == is_even
    for num_rows in (1, 2):
        check(weight, num_rows, has_bias=True)


def test_what_it_multiplies() -> None:
    device = DeviceDescriptor("cuda", 0, "", 0, capabilities=CapabilitySet([]))

    def reason(dtype: torch.dtype = torch.bfloat16, **changes: object) -> str:
        shape = LinearShape("w", IN, OUT, dtype, False, replace(SCHEME, **changes))  # type: ignore[arg-type]
        return Int4Linear.unsupported_reason(shape, device) or ""

    assert (
        reason(bits=8)
        == reason(number=Number.NF4)
        == "multiplies whole numbers of up to 4 bits and E2M1 only"
    )
    assert reason(torch.float32) == "multiplies bfloat16 and float16 activations, not torch.float32"
    assert reason(granularity=Granularity(1, 96)).endswith("a multiple of 128 columns, not 96")
    for group in (16, 128, 384, None):
        assert "group" not in reason(granularity=Granularity(1, group))


def test_products_share_the_space_they_write_weights_to(device: torch.device) -> None:
    small, large = space_for(OUT * IN, device), space_for(1 << 20, device)
    assert large.numel() >= 1 << 20
    assert space_for(OUT * IN, device) is space_for(1 << 20, device) is large
    assert small.numel() >= OUT * IN


def test_the_space_goes_with_the_last_product_that_holds_it(device: torch.device) -> None:
    kept = weakref.ref(space_for(1 << 22, device))
    gc.collect()
    assert kept() is None


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 17, 64, 300])
def test_at_real_shapes_and_in_a_graph(num_rows: int, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    int4 = replace(SCHEME, granularity=Granularity(1, 128), is_symmetric=False)
    for scheme, shape in itertools.product((int4, MXFP4), ((6144, 4096), (4096, 14336))):
        weight = drawn(device, scheme, *shape)
        check(weight, num_rows)
        multiply = Int4Linear.prepare(weight, None)
        x = torch.randn(num_rows, shape[1], device=device, dtype=torch.bfloat16)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            multiply(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = multiply(x)
        x.copy_(torch.randn_like(x))
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, multiply(x))
