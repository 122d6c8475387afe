"""Native mixtures of experts at every level of instructions, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, silu

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native_experts import ACTIVATIONS, fused_experts
from inferplane_kernels_cpu.native_linear import DTYPES

pytestmark = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=str(native.unavailable_reason())
)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def gate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    g, u = gate_up.chunk(2, -1)
    if activation == "silu":
        return silu(g) * u
    if activation == "gelu_tanh":
        return gelu(g, approximate="tanh") * u
    g, u = g.clamp(max=1.5), u.clamp(-1.5, 1.5)
    return g * torch.sigmoid(1.3 * g) * (u + 1)


def one_by_one(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    activation: str,
    first_expert: int,
) -> torch.Tensor:
    """Every route by itself, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (row, chosen) in enumerate(zip(weights.double(), ids.tolist())):
        for weight, expert in zip(row, chosen):
            expert -= first_expert
            if 0 <= expert < len(w13):
                first = w13[expert].double() @ x[token].double()
                first += 0 if biases[0] is None else biases[0][expert].double()
                second = w2[expert].double() @ gate(first, activation)
                second += 0 if biases[1] is None else biases[1][expert].double()
                out[token] += weight * second
    return out


@pytest.mark.parametrize("level", native.levels())
@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(list(DTYPES)),
    activation=st.sampled_from(ACTIVATIONS),
    num_tokens=st.one_of(st.integers(0, 9), st.sampled_from([40, 90])),
    num_experts=st.integers(1, 9),
    hidden=st.sampled_from([16, 33, 96]),
    inner=st.sampled_from([8, 24, 70]),
    has_bias=st.booleans(),
    first_expert=st.integers(0, 3),
    data=st.data(),
)
def test_mixtures_of_any_shape(
    level: str,
    dtype: torch.dtype,
    activation: str,
    num_tokens: int,
    num_experts: int,
    hidden: int,
    inner: int,
    has_bias: bool,
    first_expert: int,
    data: st.DataObject,
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 30), "seed"))
    num_everywhere = first_expert + num_experts + 2
    top_k = data.draw(st.integers(1, num_everywhere), "top_k")
    ids = torch.rand(num_tokens, num_everywhere).argsort(1)[:, :top_k].int()
    weights = torch.rand(num_tokens, top_k).softmax(-1)
    x = torch.randn(num_tokens, hidden).to(dtype)
    w13 = (torch.randn(num_experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
    w2 = (torch.randn(num_experts, hidden, inner) / inner**0.5).to(dtype)
    biases = (torch.randn(num_experts, 2 * inner).to(dtype), torch.randn(num_experts, hidden).to(dtype))
    biases = biases if has_bias else (None, None)
    want = one_by_one(x, weights, ids, w13, w2, biases, activation, first_expert)
    got = fused_experts(
        x,
        weights,
        ids,
        w13,
        w2,
        activation=activation,
        w13_bias=biases[0],
        w2_bias=biases[1],
        first_expert=first_expert,
        swiglu_alpha=1.3,
        swiglu_limit=1.5,
        at=level,
    )
    assert (got.dtype, got.shape) == (dtype, want.shape)
    assert ((got.double() - want).abs() <= TOLERANCES[dtype] * (want.abs() + 1)).all()


@pytest.mark.parametrize("num_threads", [1, 5])
def test_threads_that_are_more_or_fewer_than_experts(num_threads: int) -> None:
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(3, 48), torch.randn(4, 320, 48) / 7, torch.randn(4, 48, 160) / 12
    weights, ids = torch.tensor([[0.25, 0.75]] * 3), torch.tensor([[1, 3], [3, 0], [1, 0]])
    want = one_by_one(x, weights, ids, w13, w2, (None, None), "silu", 0)
    before = native.num_threads()
    try:
        native.set_num_threads(num_threads)
        torch.testing.assert_close(
            fused_experts(x, weights, ids, w13, w2).double(), want, rtol=1e-5, atol=1e-5
        )
    finally:
        native.set_num_threads(before)


def test_an_unknown_activation_is_named() -> None:
    x, ids = torch.randn(1, 4), torch.zeros(1, 1).int()
    with pytest.raises(
        ValueError, match="activation 'relu' should be one of silu, gelu_tanh, clamped_swiglu"
    ):
        fused_experts(x, ids.float(), ids, x.view(1, 1, 4), x.view(1, 4, 1), activation="relu")
