"""Level 3: each linear kernel over shapes, biases and numbers of tokens, against float64."""

from __future__ import annotations

import pytest
import torch

from inferplane.api.linear import LinearShape
from inferplane.api.ops import DEFAULT_TOLERANCES
from inferplane_conformance.closeness import assert_close
from inferplane_conformance.subject import Subject

SHAPES = [(64, 64), (64, 192), (160, 64), (96, 40), (128, 1003), (33, 17)]
"""(in_features, out_features), some of them no multiple of anything."""
NUM_TOKENS = (1, 2, 3, 16, 65)


@torch.inference_mode()
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_linear(subject: Subject, dtype: torch.dtype, shape: tuple[int, int], has_bias: bool) -> None:
    in_features, out_features = shape
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(out_features, in_features, generator=generator) * in_features**-0.5).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if has_bias else None
    runtime = subject.runtime
    decision = subject.plugins.linear_decision(
        LinearShape("layer", in_features, out_features, dtype, has_bias), subject.device
    )
    own = [c for c in decision.candidates if c.reason is None and c.plugin == subject.device.platform]
    for candidate in dict.fromkeys((*own, decision.chosen)):
        device_weight = runtime.to_device(weight.clone())
        device_bias = None if bias is None else runtime.to_device(bias.clone())
        multiply = candidate.implementation.prepare(device_weight, device_bias)
        assert torch.equal(runtime.to_host(device_weight), weight), f"{candidate.name} changes the weight"
        for num_tokens in NUM_TOKENS:
            x = torch.randn(num_tokens, in_features, generator=generator).to(dtype)
            expected = x.double() @ weight.double().T
            if bias is not None:
                expected += bias.double()
            device_x = runtime.to_device(x.clone())
            found = multiply(device_x)
            where = f"{candidate.name} of {num_tokens} tokens"
            assert found.dtype == dtype, where
            assert_close(runtime.to_host(found), expected, DEFAULT_TOLERANCES[dtype], where)
            assert torch.equal(runtime.to_host(device_x), x), f"{where} changes its input"
