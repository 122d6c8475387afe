"""Products by fp8 weights with a scale for each block against the dequantized weight in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.api import CapabilitySet, DeviceDescriptor
from inferplane.api.linear import LinearShape
from inferplane.api.ops import add_rms_norm, silu_and_mul
from inferplane.api.quant import Granularity, Number, QuantizedWeight, QuantScheme
from inferplane.api.quantized_weight import Activation, stack
from inferplane_torch_accelerator import fp8_block_linear
from inferplane_torch_accelerator.fp8_block_multiply import Fp8BlockMultiply
from inferplane_torch_accelerator.launch import Launch

SCHEME = QuantScheme(
    Number.FP8_E4M3, 8, Granularity(128, 128), torch.float32,
    activation=Activation.DYNAMIC_GROUP, activation_number=Number.FP8_E4M3,
)  # fmt: skip


class Fp8BlockLinear(fp8_block_linear.Fp8BlockLinear):
    """As a platform names it."""

    name = "acme_fp8_block"
    launch = Launch("nvidia")


def drawn(
    device: torch.device, out_features: int, in_features: int, scheme: QuantScheme = SCHEME
) -> QuantizedWeight:
    codes = (torch.randn(out_features, in_features) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(scheme.granularity.scale_shape(out_features, in_features)) / 100 + 1e-3
    scale = scale.to(scheme.scale_dtype)
    return QuantizedWeight(scheme, out_features, in_features, codes.to(device), scale.to(device))


def check(weight: QuantizedWeight, num_rows: int, *, has_bias: bool, device: torch.device) -> None:
    """Rounding a group to e4m3 errs by 2.5 % of each number, which averages out to as much of the sum; Triton's
    interpreter, which runs on the host, loses a carry and errs by more. It also multiplies no bfloat16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    tolerance = 1e-2 if num_rows == 1 else 4e-2 if device.type == "cuda" else 8e-2
    out_features, in_features = weight.out_features, weight.in_features
    bias = torch.randn(out_features).to(device, dtype) if has_bias else None
    multiply = Fp8BlockLinear.prepare(weight, bias)
    assert isinstance(multiply, Fp8BlockMultiply)
    x, residual = (torch.randn(num_rows, in_features).to(device, dtype) for _ in range(2))
    norm = torch.rand(in_features).to(device, dtype) + 0.5
    wide = weight.dequantize(torch.float32).double()

    def product(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(y, wide, None if bias is None else bias.double())

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        assert got.dtype == dtype and got.shape == want.shape
        return ((got.double() - want).norm() / want.norm()).item()

    assert error(multiply(x), product(x.double())) < tolerance
    assert error(multiply.silu_and_mul(x), silu_and_mul(product(x.double()))) < 2 * tolerance
    after = product(add_rms_norm(x.double(), residual.double(), norm.double(), 1e-5)[0])
    for is_gated in (False, True):
        got, total = multiply.after_add_rms_norm(x.clone(), residual.clone(), norm, 1e-5, is_gated=is_gated)
        assert error(got, silu_and_mul(after) if is_gated else after) < 2 * tolerance
        assert error(total, x.double() + residual.double()) < 1e-2


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 33, 70])
def test_products(num_rows: int, has_bias: bool, device: torch.device) -> None:
    """The last block of rows and of columns is cut short, and one of rows has the end of the gate and up's begin."""
    torch.manual_seed(0)
    check(drawn(device, 216, 328), num_rows, has_bias=has_bias, device=device)


@pytest.mark.parametrize("num_rows", [1, 3, 70])
@pytest.mark.parametrize(
    "scheme",
    [
        replace(SCHEME, granularity=Granularity(1, 128)),
        replace(SCHEME, granularity=Granularity(64, 256)),
        replace(SCHEME, scale_dtype=torch.float8_e8m0fnu),
        replace(SCHEME, scale_dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_other_blocks_and_scales(scheme: QuantScheme, num_rows: int, device: torch.device) -> None:
    torch.manual_seed(0)
    check(drawn(device, 72, 264, scheme), num_rows, has_bias=False, device=device)


@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_parts(num_rows: int, device: torch.device) -> None:
    """Of matrices that are one product, and of a rank: where a block is cut, each row has the scales of its own."""
    torch.manual_seed(0)
    gate, up = drawn(device, 192, 256), drawn(device, 192, 256)
    halves = [each.rows(slice(0, 96)) for each in (gate, up)]
    fused = stack([gate, up], ["gate", "up"])
    assert fused.scheme.granularity == halves[0].scheme.granularity == Granularity(1, 128)
    parts = (fused, stack(halves, ["gate", "up"]), gate.columns(128, 256), gate.rows(slice(128, 192)))
    for part in parts:
        check(part, num_rows, has_bias=False, device=device)


def test_a_table_says_how(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = set()

    def config(kernel: str, shape: tuple[int, ...], default: object, like: torch.Tensor) -> object:
        asked.add((kernel, shape[:-2]))
        return default

    for name in ("config", "measured"):
        monkeypatch.setattr(Fp8BlockLinear.launch, name, config)
    Fp8BlockLinear.prepare(drawn(device, 64, 128), None)
    few = {(kernel, (width,)) for kernel in ("skinny_matmul_fp8_block", "skinny_matmul_gated_fp8_block")
           for width in (16, 32, 64)}  # fmt: skip
    many = {("block_matmul", (rows,)) for rows in (128, 256, 512, 1024, 2048, 4096, 8192)}
    assert asked >= few | many | {("matvec_fp8_block", ()), ("matvec_gated_fp8_block", ())}


def test_what_it_multiplies() -> None:
    device = DeviceDescriptor("cuda", 0, "", 0, capabilities=CapabilitySet(["fp8_e4m3_matmul"]))

    def reason(on: DeviceDescriptor = device, dtype: torch.dtype = torch.bfloat16, **changes: object) -> str:
        shape = LinearShape("w", 72, 24, dtype, False, replace(SCHEME, **changes))  # type: ignore[arg-type]
        return Fp8BlockLinear.unsupported_reason(shape, on) or ""

    assert reason(number=Number.FP8_E5M2) == "multiplies fp8_e4m3 weights only"
    assert reason(granularity=Granularity(1, None)).endswith("not channel")
    assert reason(granularity=Granularity(1, 32)).endswith("of a multiple of 128 columns, not group 32")
    assert "does not allow" in reason(activation=Activation.NONE)
    assert "not torch.float32" in reason(dtype=torch.float32)
    assert reason(replace(device, capabilities=CapabilitySet([]))) == "the device has no fp8_e4m3_matmul"


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 17, 64, 65, 300, 2048])
def test_at_real_shapes(num_rows: int, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    torch.manual_seed(0)
    for shape in ((6144, 4096), (4096, 14336), (576, 7168), (7232, 1536)):
        check(drawn(device, *shape), num_rows, has_bias=False, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 5, 100])
def test_in_a_graph(num_rows: int, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the host has no graphs")
    torch.manual_seed(0)
    multiply = Fp8BlockLinear.prepare(drawn(device, 512, 1024), None)
    x = torch.randn(num_rows, 1024, device=device, dtype=torch.bfloat16)
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
