"""The reference bodies of the ops against transformers' own, to the last bit: other rounding is another model."""

from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from inferplane.api.ops import OPS

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@DTYPES
def test_rms_norm_rounds_before_it_scales(generator: torch.Generator, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((50, 96), (96,)))
    norm = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    norm.weight.data.copy_(weight)
    before = x.clone()
    assert torch.equal(OPS["rms_norm"].reference(x, weight, 1e-5), norm(x))
    assert torch.equal(x, before)


@DTYPES
def test_add_rms_norm_norms_the_rounded_sum(generator: torch.Generator, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(50, 96, generator=generator).to(dtype) for _ in range(2))
    norm = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    normed, total = OPS["add_rms_norm"].reference(x.clone(), residual.clone(), norm.weight.data, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))


@DTYPES
@pytest.mark.parametrize("rotary_dim", [24, 16])
def test_rotary_turns_the_leading_part(
    generator: torch.Generator, dtype: torch.dtype, rotary_dim: int
) -> None:
    q, k = (torch.randn(7, heads, 24, generator=generator).to(dtype) for heads in (4, 2))
    angles = torch.randn(32, rotary_dim // 2, generator=generator)
    positions = torch.tensor([0, 3, 31, 3, 8, 1, 2])
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    both = torch.cat([angles, angles], dim=-1)[positions]
    cos, sin = both.cos().to(dtype), both.sin().to(dtype)
    want = apply_rotary_pos_emb(q[..., :rotary_dim], k[..., :rotary_dim], cos, sin, unsqueeze_dim=1)
    for got, turned, x in zip(OPS["rotary"].reference(q, k, positions, table), want, (q, k)):
        torch.testing.assert_close(got[..., :rotary_dim], turned, rtol=1e-6, atol=1e-6)
        assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


@DTYPES
def test_silu_and_mul_has_the_gate_first(generator: torch.Generator, dtype: torch.dtype) -> None:
    gate, up = (torch.randn(50, 48, generator=generator).to(dtype) for _ in range(2))
    got = OPS["silu_and_mul"].reference(torch.cat([gate, up], dim=-1))
    torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up)


@DTYPES
def test_gelu_tanh_and_mul_has_the_gate_first(generator: torch.Generator, dtype: torch.dtype) -> None:
    gate, up = (torch.randn(50, 48, generator=generator).to(dtype) for _ in range(2))
    got = OPS["gelu_tanh_and_mul"].reference(torch.cat([gate, up], dim=-1))
    torch.testing.assert_close(got, torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_are_routed_and_run_as_in_transformers(generator: torch.Generator, renormalize: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=48,
        moe_intermediate_size=40,
        num_experts=16,
        num_experts_per_tok=3,
        norm_topk_prob=renormalize,
    )
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    x = torch.randn(1, 50, 48, generator=generator)
    logits, weights, ids = block.gate(x)
    got_weights, got_ids = OPS["topk_softmax"].reference(logits, 3, renormalize)
    assert torch.equal(got_ids, ids.int())
    torch.testing.assert_close(got_weights, weights, rtol=1e-6, atol=1e-7)
    w13, w2 = block.experts.gate_up_proj, block.experts.down_proj
    got = OPS["fused_experts"].reference(x[0], got_weights, got_ids, w13, w2)
    torch.testing.assert_close(got, block(x)[0], rtol=1e-5, atol=1e-5)
    # experts on two ranks, whose results add up
    parts = [
        OPS["fused_experts"].reference(
            x[0], got_weights, got_ids, w13[part], w2[part], first_expert=part.start
        )
        for part in (slice(0, 7), slice(7, 16))
    ]
    torch.testing.assert_close(sum(parts), got, rtol=1e-5, atol=1e-5)


def test_clamped_swiglu_and_biases_as_in_transformers(generator: torch.Generator) -> None:
    config = GptOssConfig(
        hidden_size=48, intermediate_size=40, num_local_experts=5, num_experts_per_tok=2, swiglu_limit=0.5
    )
    experts = GptOssExperts(config)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    x = torch.randn(50, 48, generator=generator)
    weights, ids = OPS["topk_softmax"].reference(torch.randn(50, 5, generator=generator), 2, True)
    # transformers has gate and up in turns and the matrices transposed
    w13, bias = (
        torch.cat([stacked[..., ::2], stacked[..., 1::2]], -1)
        for stacked in (experts.gate_up_proj, experts.gate_up_proj_bias)
    )
    got = OPS["fused_experts"].reference(
        x,
        weights,
        ids,
        w13.transpose(1, 2),
        experts.down_proj.transpose(1, 2),
        activation="clamped_swiglu",
        w13_bias=bias,
        w2_bias=experts.down_proj_bias,
        swiglu_limit=0.5,
    )
    torch.testing.assert_close(got, experts(x, ids.long(), weights), rtol=1e-5, atol=1e-4)


@DTYPES
@pytest.mark.parametrize("vocab_size", [1, 7, 8, 37, 64])
def test_the_best_token_is_the_first_of_the_largest(
    generator: torch.Generator, dtype: torch.dtype, vocab_size: int
) -> None:
    logits = torch.randint(-3, 3, (50, vocab_size), generator=generator).to(dtype)
    tokens, is_wrong = OPS["best_token"].reference(logits)
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert not is_wrong.any()


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_a_row_without_a_best_token_is_told_from_its_neighbours(
    generator: torch.Generator, bad: float
) -> None:
    logits = torch.randn(3, 40, generator=generator)
    logits[1, 17 if bad != float("-inf") else slice(None)] = bad
    tokens, is_wrong = OPS["best_token"].reference(logits)
    assert is_wrong.tolist() == [0, 1, 0]
    assert tokens.tolist() == [int(logits[0].argmax()), 0, int(logits[2].argmax())]


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
@DTYPES
def test_example_inputs_fit_the_op_and_its_tolerances(op, dtype: torch.dtype) -> None:
    """What every provider's tests start from: the reference itself is within its own tolerance of float64."""
    inputs = op.example_inputs(torch.Generator().manual_seed(1), dtype)
    again = op.example_inputs(torch.Generator().manual_seed(1), dtype)
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    got, want, repeated = (op.reference(*arguments) for arguments in (inputs, wide, again))
    relative, absolute = op.tolerances[dtype]
    dtypes = {
        "topk_softmax": (torch.float32, torch.int32),
        "best_token": (torch.int64,),
        "draw_token": (torch.int64,),
        "ssm_scan": (dtype, torch.float32),
        "selective_scan": (dtype, torch.float32),
        "gated_delta_rule": (dtype, torch.float32),
    }.get(op.name, (dtype, dtype))
    results = (r if isinstance(r, tuple) else (r,) for r in (got, want, repeated))
    for one, other, same, result_dtype in zip(*results, dtypes):
        assert one.dtype == result_dtype
        assert torch.equal(one, same)
        torch.testing.assert_close(one.double(), other.double(), rtol=relative, atol=absolute)
