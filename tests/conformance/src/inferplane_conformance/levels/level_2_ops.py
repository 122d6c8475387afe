"""Level 2: every op that the platform brings, and every reference that runs on its device for want of one.

Cases come from each op's own input generator. What is expected is the reference body in float64 on the host.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferplane.api.ops import OPS, Op
from inferplane_conformance.closeness import assert_close, is_unchanged
from inferplane_conformance.providers import op_implementations
from inferplane_conformance.pytest_plugin import KitOptions
from inferplane_conformance.subject import Subject

pytestmark = pytest.mark.beside_others

SEEDS = range(5)


@torch.inference_mode()
@pytest.mark.parametrize("layout", ["whole", "strided"])
@pytest.mark.parametrize("name", OPS)
def test_op(subject: Subject, kit_options: KitOptions, name: str, dtype: torch.dtype, layout: str) -> None:
    """Each implementation that says it can, and the one that is used."""
    implementations = op_implementations(subject, name, dtype)
    assert implementations
    for provider, function in implementations.items():
        for seed in SEEDS[:1] if kit_options.is_quick else SEEDS:
            arguments = OPS[name].example_inputs(torch.Generator().manual_seed(seed), dtype)
            expected = OPS[name].reference(*(_wide(each) for each in arguments))
            check(subject, OPS[name], provider, function, arguments, expected, dtype, layout)


def check(
    subject: Subject,
    op: Op,
    provider: str,
    function: Any,
    arguments: tuple[Any, ...],
    expected: Any,
    dtype: torch.dtype,
    layout: str,
) -> None:
    runtime = subject.runtime
    on_device = [
        runtime.to_device(each.clone()) if isinstance(each, torch.Tensor) else each for each in arguments
    ]
    if layout == "strided":
        on_device[0] = _with_gaps(on_device[0])
    wanted = expected if isinstance(expected, tuple) else (expected,)
    poison(subject, wanted, dtype)
    result = function(*on_device)
    runtime.synchronize()
    results = result if isinstance(result, tuple) else (result,)
    assert len(results) == len(wanted), f"{provider} returns {len(results)} results"
    where = f"{op.name} of {provider} in {dtype}"
    for index, (found, want) in enumerate(zip(results, wanted)):
        assert found.device == runtime.torch_device, f"{where}: result {index} is on {found.device}"
        assert_close(runtime.to_host(found), want, op.tolerances[dtype], f"{where}, result {index}")
    for index, (before, after) in enumerate(zip(arguments, on_device)):
        if isinstance(before, torch.Tensor) and index not in op.overwrites:
            assert is_unchanged(runtime.to_host(after), before), f"{where}: argument {index} was changed"


def poison(subject: Subject, like: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    """Leaves NaN in the memory that an allocator is likely to hand out next, so that what is not written shows."""
    for tensor in like:
        rubbish = torch.empty(tensor.shape, dtype=dtype, device=subject.runtime.torch_device)
        rubbish.fill_(float("nan"))


def _with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with room between the rows, as a slice of a fused product has them."""
    *rows, columns = tensor.shape
    wide = torch.empty((*rows, columns + 8), dtype=tensor.dtype, device=tensor.device)
    wide.fill_(float("nan") if tensor.is_floating_point() else 0)
    view = wide[..., :columns]
    view.copy_(tensor)
    return view


def _wide(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value.clone() if isinstance(value, torch.Tensor) else value
