"""Level 3: each quantized linear kernel over schemes, shapes and biases, against the dequantized weight in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane.api.linear import LinearShape, Multiply, RowProduct
from inferplane.api.quant import QuantizedWeight
from inferplane_conformance.closeness import assert_scale, assert_within
from inferplane_conformance.quantized_cases import (
    ROUNDING,
    SCHEMES,
    declared_rounding,
    draw,
    on_device,
    rounding_of_activations,
    static_scale,
)
from inferplane_conformance.quick import crossed
from inferplane_conformance.subject import Subject

pytestmark = pytest.mark.beside_others

SHAPES = {
    "128x64": (128, 64),
    "256x160": (256, 160),
    "160x96": (160, 96),
    "72x40": (72, 40),
    "33x17": (33, 17),
}
"""(in_features, out_features): multiples of everything, groups that are cut short, multiples of nothing."""
NUM_TOKENS = (1, 2, 3, 16, 65)


@torch.inference_mode()
@pytest.mark.parametrize(("scheme", "shape"), crossed(SCHEMES, SHAPES, "int4 by 32", "160x96"))
def test_quantized_linear(subject: Subject, dtype: torch.dtype, scheme: str, shape: str) -> None:
    """The platform's own kernels that say they can, and what is used, if it is to dequantize and multiply."""
    in_features, out_features = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    weight, numbers = draw(SCHEMES[scheme], out_features, in_features, generator)
    inputs = [torch.randn(num, in_features, generator=generator).to(dtype) for num in NUM_TOKENS]
    weight = replace(weight, input_scale=static_scale(weight.scheme, torch.cat(inputs)))
    for bias in (None, torch.randn(out_features, generator=generator).to(dtype)):
        for name, (multiply, rounding) in products(subject, weight, bias, dtype).items():
            what = f"{name}, {'no' if bias is None else 'a'} bias"
            check(subject, multiply, rounding, weight, numbers, bias, inputs, what)


def products(
    subject: Subject, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> dict[str, tuple[Multiply, float]]:
    """By name of what makes them, each with a copy of the weight of its own, and how far it may round."""
    runtime, plugins, device = subject.runtime, subject.plugins, subject.device
    shape = LinearShape("layer", weight.in_features, weight.out_features, dtype, bias is not None)
    decision = plugins.quantized_decision(replace(shape, scheme=weight.scheme), device)
    own = [each for each in decision.candidates if each.reason is None and each.plugin == device.platform]
    found: dict[str, tuple[Multiply, float]] = {}
    for candidate in dict.fromkeys((*own, decision.chosen)):
        copy = on_device(weight, runtime)
        device_bias = None if bias is None else runtime.to_device(bias)
        kernel = candidate.implementation
        if kernel is None:
            plain = plugins.choose_linear(shape, device).prepare(copy.dequantize(dtype), device_bias)
            found[candidate.name] = plain, ROUNDING[dtype]
        else:
            rounding = declared_rounding(dtype, kernel.activation_bits)
            found[candidate.name] = kernel.prepare(copy, device_bias), rounding
    return found


def check(
    subject: Subject,
    multiply: Multiply,
    rounding: float,
    weight: QuantizedWeight,
    numbers: torch.Tensor,
    bias: torch.Tensor | None,
    inputs: list[torch.Tensor],
    what: str,
) -> None:
    """``numbers``: the weight in float64. Element by element, and over all inputs for a factor."""
    runtime = subject.runtime
    results, wanted = [], []
    for x in inputs:
        expected = x.double() @ numbers.T
        allowed = rounding_of_activations(weight.scheme, x, numbers)
        reach = x.double().abs() @ numbers.abs().T
        if bias is not None:
            expected, reach = expected + bias.double(), reach + bias.double().abs()
        allowed = allowed + rounding * reach
        device_x = runtime.to_device(x)
        found = runtime.to_host(multiply(device_x))
        where = f"{what}, {len(x)} tokens"
        assert found.dtype == x.dtype, f"{where}: {found.dtype} instead of {x.dtype}"
        assert found.shape == expected.shape, (
            f"{where}: {list(found.shape)} instead of {list(expected.shape)}"
        )
        assert_within(found, expected, allowed, f"rounding explains ({weight.scheme})", where)
        assert torch.equal(runtime.to_host(device_x), x), f"{where}: the input was changed"
        results.append(found)
        wanted.append(expected)
    assert_scale(torch.cat(results), torch.cat(wanted), what)
    if isinstance(multiply, RowProduct):
        check_rows(subject, multiply, numbers, inputs[0].dtype, what)


def check_rows(
    subject: Subject, multiply: RowProduct, numbers: torch.Tensor, dtype: torch.dtype, what: str
) -> None:
    """In another order than they lie in, one of them twice."""
    index = torch.arange(len(numbers)).flip(0)
    index[0] = 0
    rows = subject.runtime.to_host(multiply.rows(subject.runtime.to_device(index)))
    assert rows.dtype == dtype, f"{what}: rows of {rows.dtype} instead of {dtype}"
    assert_within(
        rows,
        numbers[index],
        ROUNDING[dtype] * numbers[index].abs(),
        "rounding explains",
        f"{what}, rows",
    )
