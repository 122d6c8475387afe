"""Quantized experts against the op's reference, with the dequantized weights in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from inferplane.api import CapabilitySet, DeviceDescriptor
from inferplane.api.ops import fused_experts
from inferplane.api.quant import Granularity, Number, QuantizedWeight, QuantScheme
from inferplane.api.quantized_experts import ExpertsShape
from inferplane_torch_accelerator import quantized_experts
from inferplane_torch_accelerator.launch import Launch

EXPERTS, TOP_K = 4, 2
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FP8 = QuantScheme(Number.FP8_E4M3, 8, Granularity(1, None), torch.float32)
INT8 = QuantScheme(Number.INT, 8, Granularity(1, None), torch.float32)


class EightBitExperts(quantized_experts.EightBitExperts):
    """As a platform names it."""

    name = "acme_8bit_experts"
    launch = Launch("nvidia")


class FourBitExperts(quantized_experts.FourBitExperts):
    """As a platform names it."""

    name = "acme_4bit_experts"
    launch = Launch("nvidia")


def drawn(scheme: QuantScheme, out_features: int, in_features: int, device: torch.device) -> QuantizedWeight:
    blocks = scheme.granularity.scale_shape(out_features, in_features)
    if scheme.is_packed:
        codes = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8)
        scale = torch.full(blocks, 2.0 ** -round(2.5 + math.log2(in_features) / 2)).to(scheme.scale_dtype)
        return QuantizedWeight(scheme, out_features, in_features, codes.to(device), scale.to(device))
    numbers = torch.randn(out_features, in_features) * 40
    if scheme.number is Number.INT:
        codes = numbers.clamp(-128, 127).to(torch.int8)
    else:
        codes = numbers.to(torch.float8_e4m3fn)
    scale = torch.rand(blocks) + 0.5
    scale /= 40 * in_features**0.5
    return QuantizedWeight(scheme, out_features, in_features, codes.to(device), scale.to(device))


def shape_of(
    scheme: QuantScheme, dtype: torch.dtype, hidden: int = 64, inner: int = 32, *, num_experts: int = EXPERTS
) -> ExpertsShape:
    return ExpertsShape(
        name="experts", num_experts=num_experts, first_expert=1, hidden_size=hidden, intermediate_size=inner,
        dtype=dtype, activation="clamped_swiglu", swiglu_alpha=1.5, swiglu_limit=2.0, has_bias=True, gate_up=scheme,
        down=scheme,
    )  # fmt: skip


def check(shape: ExpertsShape, num_tokens: int, device: torch.device, top_k: int = TOP_K) -> None:
    torch.manual_seed(0)
    num_experts, hidden, inner, dtype = (
        shape.num_experts, shape.hidden_size, shape.intermediate_size, shape.dtype,
    )  # fmt: skip
    gate_up = drawn(shape.gate_up, num_experts * 2 * inner, hidden, device)
    down = drawn(shape.down, num_experts * hidden, inner, device)
    biases = [torch.randn(num_experts, size).to(device, dtype) for size in (2 * inner, hidden)]
    x = torch.randn(num_tokens, hidden).to(device, dtype)
    # some are those of another rank
    ids = torch.stack([torch.randperm(num_experts + 2)[:top_k] for _ in range(num_tokens)]).int().to(device)
    weights = torch.rand(num_tokens, top_k).to(device)
    kernel = FourBitExperts if shape.gate_up.is_packed else EightBitExperts
    got = kernel.prepare(shape, gate_up, down, *biases)(x, weights, ids)
    want = fused_experts(
        x.double(), weights, ids, gate_up.dequantize(torch.float64).unflatten(0, (num_experts, -1)),
        down.dequantize(torch.float64).unflatten(0, (num_experts, -1)), activation=shape.activation,
        w13_bias=biases[0].double(), w2_bias=biases[1].double(), first_expert=1, swiglu_alpha=1.5, swiglu_limit=2.0,
    )  # fmt: skip
    assert got.dtype == dtype
    assert (got.double() - want).norm() / want.norm() < TOLERANCES[dtype]


@pytest.mark.parametrize(
    "granularity", [Granularity(1, None), Granularity(16, 32), Granularity(1, 32)], ids=str
)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_experts(granularity: Granularity, num_tokens: int, device: torch.device) -> None:
    check(shape_of(replace(FP8, granularity=granularity), torch.float16), num_tokens, device)


def test_whole_numbers(device: torch.device) -> None:
    check(shape_of(INT8, torch.float32), 2, device)


INT4 = QuantScheme(Number.INT, 4, Granularity(1, 32), torch.bfloat16)
MXFP4 = QuantScheme(Number.FP4, 4, Granularity(1, 32), torch.float8_e8m0fnu)


@pytest.mark.parametrize("scheme", [INT4, MXFP4], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_four_bits(scheme: QuantScheme, num_tokens: int, device: torch.device) -> None:
    check(shape_of(scheme, torch.float16), num_tokens, device)


def test_what_four_bits_it_multiplies() -> None:
    device = DeviceDescriptor("cuda", 0, "", 0, capabilities=CapabilitySet(["fp8_e4m3_matmul"]))

    def reason(dtype: torch.dtype = torch.bfloat16, **changes: object) -> str:
        down = replace(INT4, **changes)  # type: ignore[arg-type]
        return FourBitExperts.unsupported_reason(replace(shape_of(MXFP4, dtype), down=down), device) or ""

    assert reason(torch.float32).endswith("of bfloat16, float16, not torch.float32")
    assert reason(number=Number.NF4) == "multiplies whole numbers of up to 4 bits and E2M1 only"
    assert reason(granularity=Granularity(1, 96)).endswith("not 96")
    assert "columns" not in reason(bits=3, is_symmetric=False, has_offset=True)


def test_what_it_multiplies() -> None:
    device = DeviceDescriptor("cuda", 0, "", 0, capabilities=CapabilitySet([]))

    def reason(dtype: torch.dtype = torch.bfloat16, **changes: object) -> str:
        down = replace(FP8, **changes)  # type: ignore[arg-type]
        return EightBitExperts.unsupported_reason(replace(shape_of(FP8, dtype), down=down), device) or ""

    assert reason(torch.float64).endswith("not torch.float64")
    assert reason(number=Number.NF4, bits=4) == "multiplies codes of a byte, not nf4, channel"
    assert reason(is_symmetric=False) == reason(has_offset=True) == "takes no zero points or offsets"
    assert reason(granularity=Granularity(1, 24)).endswith("a multiple of 16 columns, not 24")
    for granularity in (Granularity(128, 128), Granularity(1, None), Granularity(1, 32)):
        assert "columns" not in reason(granularity=granularity)
    old = replace(device, name="an old GPU", capabilities=CapabilitySet())
    assert str(EightBitExperts.unsupported_reason(shape_of(FP8, torch.bfloat16), old)).startswith(
        "an old GPU lacks fp8_e4m3_matmul"
    )
    assert "lacks" not in str(EightBitExperts.unsupported_reason(shape_of(INT8, torch.bfloat16), old))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scheme", [FP8, replace(FP8, granularity=Granularity(128, 128)), INT8, INT4, MXFP4], ids=str
)
@pytest.mark.parametrize("num_tokens", [1, 2, 40, 3000])
def test_at_real_shapes(scheme: QuantScheme, num_tokens: int, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU")
    check(shape_of(scheme, torch.bfloat16, 2048, 768, num_experts=64), num_tokens, device, top_k=8)
