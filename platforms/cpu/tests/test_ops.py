"""Each op implementation against the op's reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from inferplane.api.ops import OPS, OpImpl
from inferplane_cpu.ops import OP_IMPLEMENTATIONS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("impl", OP_IMPLEMENTATIONS, ids=lambda impl: f"{impl.op} of {impl.provider}")
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


@pytest.mark.parametrize(
    "rotary",
    [impl.fn for impl in OP_IMPLEMENTATIONS if impl.op == "rotary"],
    ids=[impl.provider for impl in OP_IMPLEMENTATIONS if impl.op == "rotary"],
)
@pytest.mark.parametrize("heads", [[4, 2, 2], [1, 1, 6], [6, 1, 1]], ids=str)
@pytest.mark.parametrize("k_is_first", [False, True])
def test_rotary_of_slices_of_one_projection(
    rotary: Callable[..., Any], heads: list[int], k_is_first: bool
) -> None:
    """q and k, neighbours or not, are rotated; v behind them is left alone."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(7, 8, 24, generator=generator)
    table = torch.randn(32, 16, generator=generator)
    positions = torch.randint(0, 32, (7,), generator=generator)
    before = qkv.clone()
    order = slice(None, None, -1) if k_is_first else slice(None)
    want = OPS["rotary"].reference(*before.split(heads, dim=1)[:2][order], positions, table)
    for got, each in zip(rotary(*qkv.split(heads, dim=1)[:2][order], positions, table), want):
        torch.testing.assert_close(got, each)
    assert torch.equal(qkv[:, sum(heads[:2]) :], before[:, sum(heads[:2]) :])


@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_any_number_of_rows(num_rows: int) -> None:
    x, weight = torch.randn(num_rows, 2, 64)[:, 0], torch.randn(64)
    arguments: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, weight, 1e-6),
        "silu_and_mul": (x,),
        "gelu_tanh_and_mul": (x,),
    }
    for impl in OP_IMPLEMENTATIONS:
        if impl.op in arguments:
            want = OPS[impl.op].reference(*arguments[impl.op])
            torch.testing.assert_close(impl.fn(*arguments[impl.op]), want)


def _all(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]
