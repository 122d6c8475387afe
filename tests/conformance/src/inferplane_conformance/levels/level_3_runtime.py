"""Level 3: the device runtime moves bytes without changing, losing or keeping any; graphs replay what was recorded."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch

from inferplane.api import DeviceRuntime
from inferplane_conformance.subject import Subject

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.int8,
    torch.bool,
]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (0, 4), (1, 65537)]
LEAK_ROUNDS = 40
LEAK_BYTES = 1 << 20
"""Of each round. A runtime that keeps what it copied keeps forty times that."""


@pytest.fixture
def runtime(subject: Subject) -> DeviceRuntime:
    return subject.runtime


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_there_and_back(runtime: DeviceRuntime, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        host = numbers(shape, dtype)
        there = runtime.to_device(host)
        assert there.device == runtime.torch_device
        assert (there.shape, there.dtype) == (host.shape, host.dtype)
        back = runtime.to_host(there)
        assert back.device.type == "cpu"
        assert torch.equal(back, host)


@torch.inference_mode()
def test_copies_of_what_is_not_contiguous(runtime: DeviceRuntime) -> None:
    host = numbers((6, 8), torch.float32)
    for view in (host.t(), host[::2, 1::3], host[1:1]):
        assert torch.equal(runtime.to_host(runtime.to_device(view)), view)
    there = runtime.to_device(host)
    assert torch.equal(runtime.to_host(there.t()[2:5]), host.t()[2:5])


@torch.inference_mode()
def test_copies_into_what_exists(runtime: DeviceRuntime) -> None:
    staged = runtime.pin((4, 9), torch.int32)
    assert not staged.any()
    staged.copy_(numbers((4, 9), torch.int32))
    out = torch.zeros((4, 9), dtype=torch.int32, device=runtime.torch_device)
    runtime.copy_to_device(out, staged)
    event = runtime.record_event()
    event.wait()
    assert torch.equal(runtime.to_host(out), staged)


@torch.inference_mode()
def test_a_copy_to_the_host_is_of_its_moment(runtime: DeviceRuntime) -> None:
    there = runtime.to_device(numbers((1000,), torch.float32).clone())
    copy = runtime.to_host_async(there)
    there.add_(1)
    assert torch.equal(copy.tensor(), numbers((1000,), torch.float32))


def test_memory_is_told(runtime: DeviceRuntime) -> None:
    memory = runtime.memory()
    assert 0 < memory.available_bytes <= memory.total_bytes


def used_bytes(runtime: DeviceRuntime) -> int:
    gc.collect()
    runtime.synchronize()
    if runtime.is_host_memory:  # what others on the machine do to the available memory is no leak of ours
        return int(psutil.Process().memory_info().rss)
    memory = runtime.memory()
    return memory.total_bytes - memory.available_bytes


@torch.inference_mode()
def test_copies_leave_no_memory_behind(runtime: DeviceRuntime) -> None:
    host = torch.zeros(LEAK_BYTES, dtype=torch.uint8)

    def copy_around() -> None:
        there = runtime.to_device(host.clone())
        runtime.copy_to_device(there, host)
        runtime.to_host(there)
        runtime.to_host_async(there).wait()

    for _ in range(3):  # pools fill up first
        copy_around()
    before = used_bytes(runtime)
    for _ in range(LEAK_ROUNDS):
        copy_around()
    kept = used_bytes(runtime) - before
    assert kept < LEAK_ROUNDS * LEAK_BYTES // 4, (
        f"{kept} bytes are kept after {LEAK_ROUNDS} copies of {LEAK_BYTES}"
    )


@torch.inference_mode()
def test_a_graph_replays_what_was_recorded(runtime: DeviceRuntime) -> None:
    graphs = runtime.graphs()
    if graphs is None:
        pytest.skip("the platform has no graphs")
    x = runtime.to_device(torch.arange(64.0).clone())
    out = torch.zeros(64, device=runtime.torch_device)

    def compute() -> None:
        out.copy_((x * 2 + 1).relu())

    try:
        graph = graphs.capture(compute)
    except RuntimeError as error:
        pytest.skip(f"the platform records no operators of torch's: {error}")
    for shift in (0.0, -10.0, 3.5):
        host = torch.arange(64.0) + shift
        runtime.copy_to_device(x, host)
        graph.replay()
        assert torch.equal(runtime.to_host(out), (host * 2 + 1).relu())
