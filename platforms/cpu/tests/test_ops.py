"""Each op implementation against the op's reference in float64."""

from __future__ import annotations

import pytest
import torch

from inferplane.api.ops import OPS, OpImpl
from inferplane_cpu.ops import OP_IMPLEMENTATIONS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("impl", OP_IMPLEMENTATIONS, ids=lambda impl: impl.op)
def test_against_the_reference(impl: OpImpl, dtype: torch.dtype) -> None:
    op = OPS[impl.op]
    for seed in range(5):
        inputs = op.example_inputs(torch.Generator().manual_seed(seed), dtype)
        wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
        want = _all(op.reference(*wide))
        got = _all(impl.fn(*inputs))
        relative, absolute = op.tolerances[dtype]
        assert len(got) == len(want)
        for one, other in zip(got, want):
            assert one.dtype == (dtype if other.is_floating_point() else other.dtype)
            torch.testing.assert_close(one.double(), other.double(), rtol=relative, atol=absolute)


def test_rotary_of_neighbours_in_one_projection() -> None:
    """q and k as slices of one tensor are rotated together; v behind them is left alone."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(7, 8, 24, generator=generator)
    table = torch.randn(32, 16, generator=generator)
    positions = torch.randint(0, 32, (7,), generator=generator)
    rotary = next(impl.fn for impl in OP_IMPLEMENTATIONS if impl.op == "rotary")
    before = qkv.clone()
    for heads in ([4, 2, 2], [1, 1, 6], [6, 1, 1]):
        q, k, _ = qkv.split(heads, dim=1)
        for got, want in zip(rotary(q, k, positions, table), OPS["rotary"].reference(q, k, positions, table)):
            torch.testing.assert_close(got, want)
    k_first, q_second, _ = qkv.split([2, 4, 2], dim=1)
    for got, want in zip(
        rotary(q_second, k_first, positions, table),
        OPS["rotary"].reference(q_second, k_first, positions, table),
    ):
        torch.testing.assert_close(got, want)
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_any_number_of_rows(num_rows: int) -> None:
    functions = {impl.op: impl.fn for impl in OP_IMPLEMENTATIONS}
    x, weight = torch.randn(num_rows, 64), torch.randn(64)
    torch.testing.assert_close(
        functions["rms_norm"](x, weight, 1e-6), OPS["rms_norm"].reference(x, weight, 1e-6)
    )
    torch.testing.assert_close(functions["silu_and_mul"](x), OPS["silu_and_mul"].reference(x))


def _all(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]
