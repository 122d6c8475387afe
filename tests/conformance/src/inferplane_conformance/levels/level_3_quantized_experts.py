"""Level 3: each kernel for quantized experts over schemes and numbers of tokens, against the op's reference with the
dequantized weights in float64."""

from __future__ import annotations

import pytest
import torch

from inferplane.api.ops import fused_experts
from inferplane.api.quantized_experts import ExpertsShape
from inferplane.api.quantized_weight import Activation
from inferplane_conformance.quantized_cases import SCHEMES, draw, on_device
from inferplane_conformance.subject import Subject

pytestmark = pytest.mark.beside_others

CASES = (
    "int4 by 32", "int4 by 64 with zero points", "int8 by channel", "int8 by channel with tokens",
    "e4m3 by channel with tokens", "e4m3 by 128×128 with groups", "e5m2 by channel", "mxfp4", "nf4 by 64",
)  # fmt: skip
NUM_TOKENS = (1, 2, 3, 16, 65)
NUM_EXPERTS, TOP_K, HIDDEN, INNER = 5, 2, 256, 128
"""Multiples of all blocks."""
FIRST = 2
"""Experts before it are another rank's."""
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest ‖found − expected‖ / ‖expected‖, with activations as they are."""
ROUNDED_ACTIVATIONS = 0.1
"""More where the scheme has the factors before both products rounded to eight bits or fewer."""


@torch.inference_mode()
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize("scheme", CASES)
def test_quantized_experts(subject: Subject, dtype: torch.dtype, scheme: str, activation: str) -> None:
    """The platform's own kernels that say they can."""
    runtime, generator = subject.runtime, torch.Generator().manual_seed(0)
    gate_up, gate_up_numbers = draw(SCHEMES[scheme], NUM_EXPERTS * 2 * INNER, HIDDEN, generator)
    down, down_numbers = draw(SCHEMES[scheme], NUM_EXPERTS * HIDDEN, INNER, generator)
    has_bias = activation == "clamped_swiglu"
    shape = ExpertsShape(
        name="experts", num_experts=NUM_EXPERTS, first_expert=FIRST, hidden_size=HIDDEN, intermediate_size=INNER,
        dtype=dtype, activation=activation, swiglu_alpha=1.702, swiglu_limit=7.0, has_bias=has_bias,
        gate_up=gate_up.scheme, down=down.scheme,
    )  # fmt: skip
    decision = subject.plugins.experts_decision(shape, subject.device)
    own = [
        each for each in decision.candidates if each.reason is None and each.plugin == subject.device.platform
    ]
    if not own:
        pytest.skip("the platform's kernels take no such experts: they are dequantized")
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if has_bias:
        biases = tuple(
            torch.randn(NUM_EXPERTS, size, generator=generator).to(dtype) for size in (2 * INNER, HIDDEN)
        )
    is_rounded = shape.gate_up.activation is not Activation.NONE
    allowed = ROUNDING[dtype] + (ROUNDED_ACTIVATIONS if is_rounded else 0)
    for candidate in own:
        device_biases = [None if bias is None else runtime.to_device(bias) for bias in biases]
        product = candidate.implementation.prepare(
            shape, on_device(gate_up, runtime), on_device(down, runtime), *device_biases
        )
        for num_tokens in NUM_TOKENS:
            x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
            ids = torch.stack(
                [torch.randperm(NUM_EXPERTS + FIRST, generator=generator)[:TOP_K] for _ in range(num_tokens)]
            ).int()
            weights = torch.rand(num_tokens, TOP_K, generator=generator)
            inputs = [runtime.to_device(each) for each in (x, weights, ids)]
            found = runtime.to_host(product(*inputs))
            expected = fused_experts(
                x.double(), weights, ids, gate_up_numbers.unflatten(0, (NUM_EXPERTS, -1)),
                down_numbers.unflatten(0, (NUM_EXPERTS, -1)), activation=activation, first_expert=FIRST,
                w13_bias=None if biases[0] is None else biases[0].double(),
                w2_bias=None if biases[1] is None else biases[1].double(),
            )  # fmt: skip
            where = f"{candidate.name}, {scheme}, {num_tokens} tokens"
            assert found.dtype == dtype, f"{where}: {found.dtype} instead of {dtype}"
            assert found.shape == x.shape, f"{where}: {list(found.shape)} instead of {list(x.shape)}"
            error = float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))
            # not `error > allowed`, which a result that is no number would pass
            assert error <= allowed, (
                f"{where}: off by {error:.1e} of the result, where {allowed:.1e} is allowed"
            )
            assert torch.equal(runtime.to_host(inputs[0]), x), f"{where}: the input was changed"
