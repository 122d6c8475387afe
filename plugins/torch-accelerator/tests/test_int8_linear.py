"""Products by eight-bit whole numbers against the dequantized weight in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.api import CapabilitySet, DeviceDescriptor
from inferplane.api.linear import FusedMultiply, LinearShape
from inferplane.api.ops import add_rms_norm, silu_and_mul
from inferplane.api.quant import Granularity, Number, QuantizedWeight, QuantScheme
from inferplane_torch_accelerator import int8_linear
from inferplane_torch_accelerator.launch import Launch

SCHEME = QuantScheme(Number.INT, 8, Granularity(1, None), torch.float32)
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Int8Linear(int8_linear.Int8Linear):
    """As a platform names it."""

    name = "acme_int8"
    launch = Launch("nvidia")


def check(
    scheme: QuantScheme, out_features: int, in_features: int, num_rows: int, device: torch.device
) -> None:
    torch.manual_seed(0)
    # Triton's interpreter rounds bfloat16 to zero
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    codes = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8)
    scale = (torch.rand(scheme.granularity.scale_shape(out_features, in_features)) + 0.5) / 1000
    weight = QuantizedWeight(scheme, out_features, in_features, codes.to(device), scale.to(device))
    bias = torch.randn(out_features).to(device, dtype)
    x, residual = (torch.randn(num_rows, in_features).to(device, dtype) for _ in range(2))
    wide = weight.dequantize(torch.float32).double()

    def product(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(y, wide, bias.double())

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        assert got.dtype == dtype
        return ((got.double() - want).norm() / want.norm()).item()

    multiply = Int8Linear.prepare(weight, bias)
    assert isinstance(multiply, FusedMultiply)
    assert error(multiply(x), product(x.double())) < TOLERANCES[dtype]
    # of several rows the gate and its product are rounded on the way
    assert error(multiply.silu_and_mul(x), silu_and_mul(product(x.double()))) < 2 * TOLERANCES[dtype]
    norm = torch.rand(in_features).to(device, dtype) + 0.5
    after = product(add_rms_norm(x.double(), residual.double(), norm.double(), 1e-5)[0])
    got, total = multiply.after_add_rms_norm(x.clone(), residual.clone(), norm, 1e-5, is_gated=False)
    assert error(got, after) < 2 * TOLERANCES[dtype]
    assert error(total, x.double() + residual.double()) < TOLERANCES[dtype]


@pytest.mark.parametrize("granularity", [Granularity(1, None), Granularity(None, None)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 65])
def test_products(granularity: Granularity, num_rows: int, device: torch.device) -> None:
    check(replace(SCHEME, granularity=granularity), 24, 72, num_rows, device)


def test_what_it_multiplies() -> None:
    device = DeviceDescriptor("cuda", 0, "", 0, capabilities=CapabilitySet([]))

    def reason(dtype: torch.dtype = torch.bfloat16, **changes: object) -> str:
        shape = LinearShape("w", 72, 24, dtype, False, replace(SCHEME, **changes))  # type: ignore[arg-type]
        return Int8Linear.unsupported_reason(shape, device) or ""

    assert reason(bits=4) == reason(number=Number.FP8_E4M3) == "multiplies whole numbers of 5 to 8 bits only"
    assert reason(granularity=Granularity(1, 128)).endswith("not group 128")
    assert reason(is_symmetric=False) == reason(has_offset=True) == "takes no zero points or offsets"
    assert reason(torch.float32).endswith("not torch.float32")


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 64, 300])
def test_at_real_shapes(num_rows: int, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    for shape in ((6144, 4096), (4096, 14336)):
        check(SCHEME, *shape, num_rows, device)
