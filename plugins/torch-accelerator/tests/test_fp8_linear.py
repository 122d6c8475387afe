"""Products by fp8 weights against the dequantized weight in float64, with the rounding of the activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.api import CapabilitySet, DeviceDescriptor
from inferplane.api.linear import LinearShape
from inferplane.api.ops import add_rms_norm, silu_and_mul
from inferplane.api.quant import Granularity, Number, QuantizedWeight, QuantScheme
from inferplane.api.quantized_weight import Activation
from inferplane_kernels_triton.fp8_matvec import MAX_IN
from inferplane_kernels_triton.skinny_matmul import MatmulConfig
from inferplane_torch_accelerator import fp8_linear, fp8_multiply
from inferplane_torch_accelerator.fp8_multiply import Fp8Multiply
from inferplane_torch_accelerator.launch import Launch

IN, OUT = 96, 80


class Fp8Linear(fp8_linear.Fp8Linear):
    """As a platform names it."""

    name = "acme_fp8"
    launch = Launch("nvidia")


SCHEME = QuantScheme(
    Number.FP8_E4M3, 8, Granularity(1, None), torch.float32,
    activation=Activation.DYNAMIC_TOKEN, activation_number=Number.FP8_E4M3,
)  # fmt: skip


def drawn(device: torch.device, out_features: int, in_features: int, scheme: QuantScheme) -> QuantizedWeight:
    codes = (torch.randn(out_features, in_features) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(scheme.granularity.scale_shape(out_features, in_features)) / 100 + 1e-3
    return QuantizedWeight(scheme, out_features, in_features, codes.to(device), scale.to(device))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.dtype == torch.bfloat16
    return ((got.double() - want).norm() / want.norm()).item()


def check(
    weight: QuantizedWeight, num_rows: int, *, has_bias: bool, device: torch.device, rounds: bool
) -> None:
    # rounding a token to e4m3 errs by 2.5 % of each number, which averages out to as much of the sum; Triton's
    # interpreter, which runs on the host, loses a carry and errs by more
    tolerance = 1e-2
    if rounds:
        tolerance = 8e-2 if device.type == "cpu" else 4e-2
    out_features, in_features = weight.out_features, weight.in_features
    bias = torch.randn(out_features).to(device, torch.bfloat16) if has_bias else None
    multiply = Fp8Linear.prepare(weight, bias)
    assert isinstance(multiply, Fp8Multiply)
    x, residual = (torch.randn(num_rows, in_features).to(device, torch.bfloat16) for _ in range(2))
    norm = torch.rand(in_features).to(device, torch.bfloat16) + 0.5
    wide = weight.dequantize(torch.float32).double()

    def product(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(y, wide, None if bias is None else bias.double())

    assert relative_error(multiply(x), product(x.double())) < tolerance
    assert relative_error(multiply.silu_and_mul(x), silu_and_mul(product(x.double()))) < 2 * tolerance
    after = product(add_rms_norm(x.double(), residual.double(), norm.double(), 1e-5)[0])
    for is_gated in (False, True):
        got, total = multiply.after_add_rms_norm(x.clone(), residual.clone(), norm, 1e-5, is_gated=is_gated)
        assert relative_error(got, silu_and_mul(after) if is_gated else after) < 2 * tolerance
        assert relative_error(total, x.double() + residual.double()) < 1e-2


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("granularity", [Granularity(1, None), Granularity(None, None)], ids=str)
@pytest.mark.parametrize("max_in", [MAX_IN, 0], ids=["fp8_matvec", "matvec"])
def test_one_row(
    max_in: int,
    granularity: Granularity,
    has_bias: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(fp8_multiply, "MAX_IN", max_in)
    weight = drawn(device, OUT, IN, replace(SCHEME, granularity=granularity))
    check(weight, 1, has_bias=has_bias, device=device, rounds=False)


def test_one_row_that_begins_anywhere(device: torch.device) -> None:
    torch.manual_seed(0)
    weight = drawn(device, OUT, IN, SCHEME)
    wider = torch.randn(1, IN + 3).to(device, torch.bfloat16)
    got = Fp8Linear.prepare(weight, None)(wider[:, 2 : 2 + IN])
    want = wider[:, 2 : 2 + IN].double() @ weight.dequantize(torch.float32).double().T
    assert relative_error(got, want) < 1e-2


def measured(kernel: str, shape: tuple[int, ...], default: MatmulConfig, like: torch.Tensor) -> MatmulConfig:
    """A table that lists every number of rows of every weight."""
    assert kernel.endswith("_fp8")
    return MatmulConfig(rows=16, columns=32, splits=2, num_stages=1)


@pytest.mark.parametrize("num_rows", [2, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rounded_rows(
    num_rows: int, has_bias: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(Fp8Linear.launch, "measured", measured)
    monkeypatch.setattr(torch, "_scaled_mm", None)
    check(drawn(device, OUT, IN, SCHEME), num_rows, has_bias=has_bias, device=device, rounds=True)


@pytest.mark.parametrize("num_rows", [2, 3, 17, 64, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_more_rows(num_rows: int, has_bias: bool, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the host has no scaled product")
    torch.manual_seed(0)
    check(drawn(device, OUT, IN, SCHEME), num_rows, has_bias=has_bias, device=device, rounds=True)
    check(drawn(device, 6144, 4096, SCHEME), num_rows, has_bias=has_bias, device=device, rounds=True)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_in_a_graph(num_rows: int, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the host has no graphs")
    torch.manual_seed(0)
    weight = drawn(device, 512, 256, SCHEME)
    multiply = Fp8Linear.prepare(weight, None)
    x = torch.randn(num_rows, 256, device=device, dtype=torch.bfloat16)
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


def test_what_it_multiplies() -> None:
    device = DeviceDescriptor("cuda", 0, "", 0, capabilities=CapabilitySet(["fp8_e4m3_matmul"]))

    def reason(
        on: DeviceDescriptor = device, dtype: torch.dtype = torch.bfloat16, size: int = IN, **changes: object
    ) -> str:
        shape = LinearShape("w", size, OUT, dtype, False, replace(SCHEME, **changes))  # type: ignore[arg-type]
        return Fp8Linear.unsupported_reason(shape, on) or ""

    assert reason(number=Number.INT) == "multiplies fp8_e4m3 weights only"
    assert reason(granularity=Granularity(128, 128)).endswith("not block 128×128")
    assert "does not allow" in reason(activation=Activation.NONE)
    assert "not torch.float16" in reason(dtype=torch.float16)
    assert "multiples of 16, not 40" in reason(size=40)
    assert reason(replace(device, capabilities=CapabilitySet([]))) == "the device has no fp8_e4m3_matmul"
