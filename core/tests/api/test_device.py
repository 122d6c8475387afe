"""What a device runtime gives when a vendor has written only what it must."""

from __future__ import annotations

import torch

from inferplane.api import DeviceDescriptor, DeviceRuntime, MemoryInfo
from inferplane.api.device import CallAgain


class Plain(DeviceRuntime):
    def __init__(self) -> None:
        self.descriptor = DeviceDescriptor("plain", 0, "plain", 1 << 30)
        self.torch_device = torch.device("cpu")
        self.num_synchronizations = 0

    def set_up(self, config, rank):
        return

    def memory(self):
        return MemoryInfo(1 << 30, 1 << 30)

    def synchronize(self):
        self.num_synchronizations += 1


def test_the_defaults_copy_and_wait():
    runtime = Plain()
    staged = runtime.pin((2, 3), torch.int32)
    assert staged.shape == (2, 3) and staged.dtype == torch.int32 and not staged.any()
    staged += 7
    on_device = torch.zeros(2, 3, dtype=torch.int32)
    runtime.copy_to_device(on_device, staged)
    runtime.record_event().wait()
    assert runtime.num_synchronizations == 1
    copy = runtime.to_host_async(on_device)
    copy.wait()
    assert torch.equal(copy.tensor(), torch.full((2, 3), 7, dtype=torch.int32))


def test_what_a_device_does_not_have_is_none():
    runtime = Plain()
    assert runtime.graphs() is None
    assert runtime.measure_peak_bytes(lambda: None) is None
    assert runtime.profile(lambda: None) is None


def test_calling_again_is_a_graph():
    value = torch.zeros(1)
    graph = CallAgain().capture(lambda: value.add_(1) and None)
    graph.replay()
    graph.replay()
    assert value.item() == 3
