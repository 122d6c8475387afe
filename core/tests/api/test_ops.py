"""The reference bodies of the ops against transformers' own, to the last bit: other rounding is another model."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

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
    assert torch.equal(got, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
@DTYPES
def test_example_inputs_fit_the_op_and_its_tolerances(op, dtype: torch.dtype) -> None:
    """What every provider's tests start from: the reference itself is within its own tolerance of float64."""
    inputs = op.example_inputs(torch.Generator().manual_seed(1), dtype)
    again = op.example_inputs(torch.Generator().manual_seed(1), dtype)
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    got, want, repeated = (op.reference(*arguments) for arguments in (inputs, wide, again))
    relative, absolute = op.tolerances[dtype]
    for one, other, same in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want, repeated))):
        assert one.dtype == dtype
        assert torch.equal(one, same)
        torch.testing.assert_close(one.double(), other, rtol=relative, atol=absolute)
