"""One GPU as a device: which one a rank has, its memory, and copies to and from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from inferplane.api import DeviceDescriptor, DeviceRuntime, Event, GraphBackend, HostCopy, MemoryInfo
from inferplane_cuda.graphs import CudaGraphs

if TYPE_CHECKING:
    from inferplane.api.config import EngineConfig


class CudaEvent(Event):
    """The point that the current stream has reached."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class CudaHostCopy(CudaEvent, HostCopy):
    """A copy into pinned memory, queued behind what the current stream has."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._copied.copy_(tensor, non_blocking=True)
        super().__init__()

    def tensor(self) -> torch.Tensor:
        self.wait()
        return self._copied


class CudaRuntime(DeviceRuntime):
    """Rank r of a model has the GPU r places after the selected one, among those that the process sees."""

    def __init__(self, descriptor: DeviceDescriptor) -> None:
        self.descriptor = descriptor
        self.torch_device = torch.device("cuda", descriptor.index)

    def set_up(self, config: EngineConfig, rank: int) -> None:
        """Makes the rank's GPU the current one. Products of float32 stay float32: TF32 is off, as torch has it."""
        self.torch_device = torch.device("cuda", self.descriptor.index + rank)
        torch.cuda.set_device(self.torch_device)
        if config.device.num_threads is not None:
            torch.set_num_threads(config.device.num_threads)
        torch.manual_seed(config.seed)

    def memory(self) -> MemoryInfo:
        """What torch's allocator holds without using it counts as available."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(
            self.torch_device
        )
        return MemoryInfo(total, free + cached)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def pin(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def to_host_async(self, tensor: torch.Tensor) -> HostCopy:
        return CudaHostCopy(tensor)

    def record_event(self) -> Event:
        return CudaEvent()

    def graphs(self) -> GraphBackend | None:
        return CudaGraphs(self.torch_device)

    def measure_peak_bytes(self, run: Callable[[], None]) -> int | None:
        device = self.torch_device
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        return peak

    def profile(self, run: Callable[[], object]) -> str | None:
        from inferplane_cuda.kernel_profile import record, report

        return report(record(run))
