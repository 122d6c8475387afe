"""One GPU as a device: which one a rank has, its memory, and copies to and from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inferplane.api import DeviceDescriptor, DeviceRuntime, MemoryInfo

if TYPE_CHECKING:
    from inferplane.api.config import EngineConfig


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
