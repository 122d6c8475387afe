"""Recorded steps: replays on new contents equal calls, bit for bit, and what cannot be recorded is named."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from inferplane_cpu.graphs import Arena, CpuGraphs
from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native_linear import NativeLinear

pytestmark = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=str(native.unavailable_reason())
)


@pytest.fixture
def linear() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    products: dict[int, NativeLinear] = {}  # which must live as long as a graph that calls them

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        multiply = products.setdefault(weight.data_ptr(), NativeLinear(weight, None))
        return multiply(x)

    return product


@torch.inference_mode()
def test_replays_equal_calls_on_new_contents(linear) -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(30, 64, generator=generator).bfloat16()
    weights = [torch.randn(64, 64, generator=generator).bfloat16() / 8 for _ in range(20)]
    ids, rows, out = torch.tensor([3, 1, 29]), torch.tensor([2, 0]), torch.empty(2, 64).bfloat16()

    def model() -> torch.Tensor:
        x = torch.nn.functional.embedding(ids, table)
        for weight in weights:
            halves = linear(x, weight).view(3, 2, 32)
            x = linear(halves.flatten(1), weight)
        return x.index_select(0, rows)

    graph = CpuGraphs().capture(lambda: _write(out, model()))
    assert torch.equal(out, model())
    litter = [torch.full((3, 64), float("nan")).bfloat16() for _ in range(50)]  # in whatever memory was freed
    for contents in ([0, 0, 5], [7, 8, 9], [29, 3, 1]):
        ids.copy_(torch.tensor(contents))
        out.zero_()
        graph.replay()
        assert torch.equal(out, model())
    del litter


def _write(out: torch.Tensor, value: torch.Tensor) -> None:
    out.copy_(value)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: x + 1, "aten.add"),
        (lambda x: x.t().contiguous(), "aten.clone"),
        (lambda x: x.t().reshape(-1), "aten.clone"),
        (lambda x: x.float(), "aten._to_copy"),
        (lambda x: x.zero_(), "aten.zero_"),
        (lambda x: x.sum().item(), "aten.sum"),
        (lambda x: x[0, 0].item(), "aten._local_scalar_dense"),
        (lambda x: x.copy_(x.t()), "aten.copy_"),
        (lambda x: x.index_select(1, torch.empty(0, dtype=torch.int64)), "aten.index_select"),
    ],
)
def test_operators_of_torchs_that_compute_are_refused_by_name(compute, name: str) -> None:
    x = torch.ones(4, 4).bfloat16()
    with pytest.raises(RuntimeError, match=name):
        CpuGraphs().capture(lambda: compute(x))


@torch.inference_mode()
def test_memory_is_used_again_once_no_view_holds_it_and_is_shared_by_graphs(linear) -> None:
    graphs = CpuGraphs()
    weight = torch.eye(64).bfloat16()
    x, out = torch.randn(5, 64).bfloat16(), torch.empty(5, 64).bfloat16()

    def chain(length: int) -> None:
        y, kept = x, []
        for _ in range(length):
            y = linear(y, weight)
            kept = kept or [y[0]]
        out.copy_(linear(y, weight))

    short = graphs.capture(lambda: chain(3))
    size = graphs._arena.num_bytes
    assert size == 3 * 1024  # the first, and two by turns, of 640 bytes each
    again = graphs.capture(lambda: chain(4))
    assert graphs._arena.num_bytes == size
    for graph in (short, again):
        out.zero_()
        graph.replay()
        assert torch.equal(out, x)


def test_recording_does_not_import_torchs_compiler() -> None:
    script = """
import sys, torch
from inferplane_cpu.graphs import CpuGraphs
with torch.inference_mode():
    CpuGraphs().capture(lambda: torch.empty(4, 4).view(16))
print("torch._dynamo" in sys.modules)
"""
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "False"


def test_arena() -> None:
    arena = Arena()
    first = arena.empty(torch.Size((3, 5)), torch.float32)
    view = first[1:]
    address = first.data_ptr()
    assert address % 64 == 0 and first.is_contiguous()
    del first
    assert arena.empty(torch.Size((15,)), torch.float32).data_ptr() != address
    del view
    gc.collect()
    addresses = {arena.empty(torch.Size((15,)), torch.float32).data_ptr()}
    assert addresses == {address}
    assert arena.empty(torch.Size((0, 4)), torch.bfloat16).shape == (0, 4)
    assert arena.num_bytes == 2 * 64
