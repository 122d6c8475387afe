"""Steps in one copy each, with copies that happen as late as they may."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferplane.api import DeviceDescriptor, Event
from inferplane.reference.platform import HostRuntime
from inferplane.runner.staging import ALIGNMENT_BYTES, NUM_HOST_BUFFERS, StagingBuffer


class LateRuntime(HostRuntime):
    """Queues copies, and does them when an event behind them is waited for."""

    def __init__(self) -> None:
        super().__init__(DeviceDescriptor("late", 0, "late", 1 << 30))
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_copies = 0

    def copy_to_device(self, out: torch.Tensor, host: torch.Tensor) -> None:
        self.num_copies += 1
        self.queue.append((out, host))

    def run_queue(self) -> None:
        for out, host in self.queue:
            out.copy_(host)
        self.queue.clear()

    def record_event(self) -> Event:
        runtime = self

        class Late(Event):
            def wait(self) -> None:
                runtime.run_queue()

        return Late()


def step(seed: int, size: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 100, size),
        rng.integers(0, 100, (size, 3)).astype(np.int32),
        np.zeros(0, np.int64),
        rng.integers(0, 100, size + 1).astype(np.int32),
    ]


def check(found: list[torch.Tensor], arrays: list[np.ndarray]) -> None:
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.shape == array.shape
        assert tensor.numpy().dtype == array.dtype
        assert (tensor.numpy() == array).all()


def test_one_copy_a_step_that_nothing_later_disturbs():
    runtime = LateRuntime()
    staging = StagingBuffer(runtime, 1 << 12)
    for seed in range(3 * NUM_HOST_BUFFERS):
        arrays = step(seed)
        kept = [array.copy() for array in arrays]
        found = staging.copy(arrays)
        for array in arrays:  # the caller may use its arrays again at once
            array[...] = -1
        assert runtime.num_copies == seed + 1
        if seed % 2:
            runtime.run_queue()
            check(found, kept)


def test_a_host_buffer_is_filled_again_only_after_its_copy():
    runtime = LateRuntime()
    staging = StagingBuffer(runtime, 1 << 12)
    for seed in range(NUM_HOST_BUFFERS):
        staging.copy(step(seed))
    assert len(runtime.queue) == NUM_HOST_BUFFERS
    staging.copy(step(9))
    assert len(runtime.queue) == 1, "it waited for the oldest copy"


@pytest.mark.parametrize("size", [1, 700])
def test_it_grows(size: int):
    runtime = LateRuntime()
    staging = StagingBuffer(runtime, ALIGNMENT_BYTES)
    small, large = step(1, 1), step(2, size)
    first = staging.copy(small)
    found = staging.copy(large)
    runtime.run_queue()
    check(found, large)
    if size == 700:
        check(first, small)


def test_arrays_of_one_size_lie_in_one_place():
    staging = StagingBuffer(LateRuntime(), 1 << 12)
    places = {tuple(tensor.data_ptr() for tensor in staging.copy(step(seed))) for seed in range(4)}
    assert len(places) == 1
    assert all(address % 16 == 0 for address in next(iter(places)))
