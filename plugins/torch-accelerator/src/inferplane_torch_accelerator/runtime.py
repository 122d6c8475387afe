"""One accelerator of torch: which one a rank has, its memory, copies to and from it, and its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from inferplane.api import DeviceDescriptor, DeviceRuntime, Event, GraphBackend, HostCopy, MemoryInfo
from inferplane_torch_accelerator.graphs import AcceleratorGraphs, can_record

if TYPE_CHECKING:
    from inferplane.api.config import EngineConfig


class AcceleratorEvent(Event):
    """The point that the current stream of a device module (`torch.cuda`, `torch.xpu`) has reached."""

    def __init__(self, module: Any) -> None:
        self._event = module.Event()
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()


class AcceleratorHostCopy(AcceleratorEvent, HostCopy):
    """A copy into pinned memory, queued behind what the current stream has."""

    def __init__(self, module: Any, tensor: torch.Tensor, pinned: torch.Tensor) -> None:
        self._copied = pinned
        self._copied.copy_(tensor, non_blocking=True)
        super().__init__(module)

    def tensor(self) -> torch.Tensor:
        self.wait()
        return self._copied


class AcceleratorRuntime(DeviceRuntime):
    """Rank r of a model has the device r places after the selected one, among those that the process sees."""

    device_type: ClassVar[str]
    """As in `torch.device`, which has a module of that name."""

    def __init__(self, descriptor: DeviceDescriptor) -> None:
        self.descriptor = descriptor
        self.torch_device = torch.device(self.device_type, descriptor.index)
        self._module: Any = torch.get_device_module(self.torch_device)
        self._num_threads_before: int | None = None

    def set_up(self, config: EngineConfig, rank: int) -> None:
        """Makes the rank's device the current one. Products of float32 stay float32: TF32 is off, as torch has it."""
        self.torch_device = torch.device(self.device_type, self.descriptor.index + rank)
        self._module.set_device(self.torch_device)
        if config.device.num_threads is not None:
            self._num_threads_before = torch.get_num_threads()
            torch.set_num_threads(config.device.num_threads)
        torch.manual_seed(config.seed)

    def tear_down(self) -> None:
        if self._num_threads_before is not None:
            torch.set_num_threads(self._num_threads_before)
        self._num_threads_before = None

    def memory(self) -> MemoryInfo:
        """What torch's allocator holds without using it counts as available."""
        device = self.torch_device
        free, total = self._module.mem_get_info(device)
        cached = self._module.memory_reserved(device) - self._module.memory_allocated(device)
        return MemoryInfo(total, free + cached)

    def synchronize(self) -> None:
        self._module.synchronize(self.torch_device)

    def pin(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def to_host_async(self, tensor: torch.Tensor) -> HostCopy:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return AcceleratorHostCopy(self._module, tensor, pinned)

    def record_event(self) -> Event:
        return AcceleratorEvent(self._module)

    def graphs(self) -> GraphBackend | None:
        return AcceleratorGraphs(self.torch_device) if can_record(self.device_type) else None

    def measure_peak_bytes(self, run: Callable[[], None]) -> int | None:
        device, module = self.torch_device, self._module
        module.synchronize(device)
        module.empty_cache()
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        run()
        module.synchronize(device)
        peak = module.max_memory_allocated(device) - before
        module.empty_cache()
        return int(peak)

    def profile(self, run: Callable[[], object]) -> str | None:
        from inferplane_torch_accelerator.kernel_profile import record, report

        return report(record(run, self.device_type))
