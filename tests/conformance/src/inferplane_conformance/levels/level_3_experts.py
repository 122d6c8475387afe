"""Level 3: a mixture's experts with everything that models ask of them, against float64 and one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from inferplane.api.ops import DEFAULT_TOLERANCES, EXPERT_ACTIVATIONS
from inferplane_conformance.closeness import assert_close
from inferplane_conformance.providers import op_implementations
from inferplane_conformance.quick import crossed
from inferplane_conformance.subject import Subject

pytestmark = pytest.mark.beside_others

ALPHA, LIMIT = 1.702, 1.5
"""Of ``clamped_swiglu``; the limit is small enough to be reached."""


@dataclass(frozen=True)
class Mixture:
    num_tokens: int = 9
    num_experts: int = 6
    top_k: int = 2
    hidden: int = 64
    inner: int = 48
    has_bias: bool = False
    first_expert: int = 0
    num_local_experts: int | None = None
    """Experts that this rank has; None for all."""


MIXTURES = {
    "few tokens": Mixture(),
    "one token": Mixture(num_tokens=1),
    "more tokens than a tile": Mixture(num_tokens=131),
    "one expert a token": Mixture(top_k=1),
    "all experts": Mixture(top_k=6),
    "many experts": Mixture(num_tokens=5, num_experts=64, top_k=8),
    "biases": Mixture(has_bias=True),
    "experts of one rank": Mixture(first_expert=2, num_local_experts=3),
    "sizes of no power": Mixture(hidden=80, inner=40),
}


@torch.inference_mode()
@pytest.mark.parametrize(("mixture", "activation"), crossed(MIXTURES, EXPERT_ACTIVATIONS, "biases", "silu"))
def test_experts(subject: Subject, dtype: torch.dtype, mixture: str, activation: str) -> None:
    arguments, options = make_inputs(MIXTURES[mixture], dtype)
    expected = sum_of_experts(arguments, options, activation)
    runtime = subject.runtime
    for provider, function in op_implementations(subject, "fused_experts", dtype).items():
        on_device = [runtime.to_device(each.clone()) for each in arguments]
        extra = {
            name: runtime.to_device(each.clone()) if isinstance(each, torch.Tensor) else each
            for name, each in options.items()
        }
        found = function(*on_device, activation=activation, swiglu_alpha=ALPHA, swiglu_limit=LIMIT, **extra)
        assert found.dtype == dtype, f"{provider}: {found.dtype} instead of {dtype}"
        assert_close(runtime.to_host(found), expected, DEFAULT_TOLERANCES[dtype], provider)


def make_inputs(mixture: Mixture, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The op's positional arguments and its options, in host memory."""
    generator = torch.Generator().manual_seed(0)
    num_local = mixture.num_local_experts or mixture.num_experts
    hidden, inner = mixture.hidden, mixture.inner

    def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    chosen = [
        torch.randperm(mixture.num_experts, generator=generator)[: mixture.top_k]
        for _ in range(mixture.num_tokens)
    ]
    weights = torch.rand(mixture.num_tokens, mixture.top_k, generator=generator).softmax(-1)
    arguments = [
        numbers(mixture.num_tokens, hidden),
        weights,
        torch.stack(chosen).int(),
        numbers(num_local, 2 * inner, hidden, scale=hidden**-0.5),
        numbers(num_local, hidden, inner, scale=inner**-0.5),
    ]
    options: dict[str, Any] = {"first_expert": mixture.first_expert}
    if mixture.has_bias:
        options |= {"w13_bias": numbers(num_local, 2 * inner), "w2_bias": numbers(num_local, hidden)}
    return arguments, options


def sum_of_experts(arguments: list[torch.Tensor], options: dict[str, Any], activation: str) -> torch.Tensor:
    """``[num_tokens, hidden]`` in float64."""
    x, weights, ids, w13, w2 = (each.double() if each.is_floating_point() else each for each in arguments)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, chosen in zip(weights[token], ids[token].tolist()):
            expert = chosen - options["first_expert"]
            if not 0 <= expert < len(w13):
                continue
            both = w13[expert] @ x[token]
            if "w13_bias" in options:
                both = both + options["w13_bias"][expert].double()
            gate, up = both.chunk(2)
            y = w2[expert] @ activated(gate, up, activation)
            if "w2_bias" in options:
                y = y + options["w2_bias"][expert].double()
            out[token] += weight * y
    return out


def activated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return gate / (1 + (-gate).exp()) * up
    if activation == "gelu_tanh":
        return gate / 2 * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) * up
    assert activation == "clamped_swiglu", activation
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate / (1 + (-ALPHA * gate).exp()) * (up + 1)
