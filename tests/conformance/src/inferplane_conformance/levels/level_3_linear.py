"""Level 3: each linear kernel over shapes, biases and numbers of tokens, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from inferplane.api.linear import FusedMultiply, LinearShape
from inferplane.api.ops import DEFAULT_TOLERANCES
from inferplane.plugins.decision import Candidate
from inferplane_conformance.closeness import assert_close
from inferplane_conformance.subject import Subject

pytestmark = pytest.mark.beside_others

SHAPES = [(64, 64), (64, 192), (160, 64), (96, 40), (128, 1003), (33, 17)]
"""(in_features, out_features), some of them no multiple of anything."""
NUM_TOKENS = (1, 2, 3, 16, 65)


FUSED_SHAPES = [(128, 192), (72, 34)]
EPS = 1e-5


@torch.inference_mode()
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_linear(subject: Subject, dtype: torch.dtype, shape: tuple[int, int], has_bias: bool) -> None:
    in_features, out_features = shape
    generator = torch.Generator().manual_seed(0)
    weight, bias = draw(in_features, out_features, has_bias, dtype, generator)
    runtime = subject.runtime
    for candidate in candidates(subject, LinearShape("layer", in_features, out_features, dtype, has_bias)):
        device_weight = runtime.to_device(weight.clone())
        device_bias = None if bias is None else runtime.to_device(bias.clone())
        multiply = candidate.implementation.prepare(device_weight, device_bias)
        assert torch.equal(runtime.to_host(device_weight), weight), f"{candidate.name} changes the weight"
        for num_tokens in NUM_TOKENS:
            x = torch.randn(num_tokens, in_features, generator=generator).to(dtype)
            expected = product(x.double(), weight, bias)
            for how, device_x in layouts(subject, x).items():
                found = multiply(device_x)
                where = f"{candidate.name} of {num_tokens} tokens, {how}"
                assert found.dtype == dtype, where
                assert_close(runtime.to_host(found), expected, DEFAULT_TOLERANCES[dtype], where)
                assert torch.equal(runtime.to_host(device_x), x), f"{where} changes its input"


@torch.inference_mode()
def test_norm_and_gate_taken_along(subject: Subject, dtype: torch.dtype) -> None:
    """Of kernels whose products take them; `FusedMultiply`."""
    generator = torch.Generator().manual_seed(0)
    runtime, num_tried = subject.runtime, 0
    for (in_features, out_features), has_bias in itertools.product(FUSED_SHAPES, (False, True)):
        weight, bias = draw(in_features, out_features, has_bias, dtype, generator)
        norm = (torch.rand(in_features, generator=generator) + 0.5).to(dtype)
        for candidate in candidates(
            subject, LinearShape("layer", in_features, out_features, dtype, has_bias)
        ):
            copies = (None if each is None else runtime.to_device(each.clone()) for each in (weight, bias))
            multiply = candidate.implementation.prepare(*copies)
            if isinstance(multiply, FusedMultiply):
                num_tried += 1
                check_fused(subject, candidate.name, multiply, norm, weight, bias, generator)
    if num_tried == 0:
        pytest.skip("no kernel takes norm or gate along")


def check_fused(
    subject: Subject,
    name: str,
    multiply: FusedMultiply,
    norm: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    generator: torch.Generator,
) -> None:
    """Each way of it with every number of tokens; what comes of a few is too little to see a factor in."""
    runtime, tolerance = subject.runtime, DEFAULT_TOLERANCES[weight.dtype]
    twice = (2 * tolerance[0], 2 * tolerance[1])  # what is rounded is multiplied by what is rounded
    xs, residuals = (
        [torch.randn(num, len(norm), generator=generator).to(weight.dtype) for num in NUM_TOKENS]
        for _ in range(2)
    )
    x, residual = torch.cat(xs).double(), torch.cat(residuals).double()
    gated = [runtime.to_host(multiply.silu_and_mul(runtime.to_device(each.clone()))) for each in xs]
    assert_close(torch.cat(gated), silu_and_mul(product(x, weight, bias)), twice, f"{name}, gated")
    sums = [torch.randn(num, len(weight), generator=generator).to(weight.dtype) for num in NUM_TOKENS]
    for one, other in zip(xs, sums):
        given = runtime.to_device(other.clone())
        found = multiply.added_to(given, runtime.to_device(one.clone()))
        if found is None:
            assert_close(
                runtime.to_host(given), other, (0.0, 0.0), f"{name}, a residual that nothing was added to"
            )
        else:
            expected = other.double() + product(one.double(), weight, bias)
            assert_close(runtime.to_host(found), expected, tolerance, f"{name}, added to a residual")
    device_norm = runtime.to_device(norm)
    for has_residual, is_gated in itertools.product((False, True), repeat=2):
        pairs = [
            multiply.after_add_rms_norm(
                runtime.to_device(one.clone()),
                runtime.to_device(other.clone()) if has_residual else None,
                device_norm,
                EPS,
                is_gated=is_gated,
            )
            for one, other in zip(xs, residuals)
        ]
        found, found_total = (torch.cat([runtime.to_host(each) for each in side]) for side in zip(*pairs))
        total = x + residual if has_residual else x
        root = (total.pow(2).mean(1, keepdim=True) + EPS).sqrt()
        expected = product(total / root * norm.double(), weight, bias)
        what = f"{name}, after the norm of {'x + residual' if has_residual else 'x'}"
        if is_gated:
            expected, what = silu_and_mul(expected), f"{what}, gated"
        assert_close(found, expected, twice, what)
        assert_close(found_total, total, tolerance, f"{what}, the sum")


def layouts(subject: Subject, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x on the device as models hand it over: a tensor of its own, columns of a wider product, or the transpose of what
    a mixer over time left."""
    to_device = subject.runtime.to_device
    # not NaN: a library may multiply what lies behind a row of odd length by zero
    wider = torch.cat([x.new_full((len(x), 5), 128.0), x, x.new_full((len(x), 3), 128.0)], dim=1)
    return {
        "contiguous": to_device(x.clone()),
        "columns of a wider tensor": to_device(wider)[:, 5 : 5 + x.shape[1]],
        "transposed": to_device(x.T.contiguous()).T,
    }


def draw(
    in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias. Outputs of unit inputs are of the order of 1."""
    weight = (torch.randn(out_features, in_features, generator=generator) * in_features**-0.5).to(dtype)
    return weight, torch.randn(out_features, generator=generator).to(dtype) if has_bias else None


def candidates(subject: Subject, shape: LinearShape) -> list[Candidate]:
    """The platform's own kernels that say they can, and the one that is used."""
    decision = subject.plugins.linear_decision(shape, subject.device)
    own = [c for c in decision.candidates if c.reason is None and c.plugin == subject.device.platform]
    return list(dict.fromkeys((*own, decision.chosen)))


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In float64."""
    out = x @ weight.double().T
    return out if bias is None else out + bias.double()


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up
