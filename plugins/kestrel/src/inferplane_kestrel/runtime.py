"""A card's runtime: which torch device a rank computes on, and how much of its memory is free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferplane.api import DeviceDescriptor, DeviceRuntime, MemoryInfo
from inferplane_kestrel import device as cards

if TYPE_CHECKING:
    from inferplane.api.config import EngineConfig


class KestrelRuntime(DeviceRuntime):
    """Rank r computes on the card r places after the selected one."""

    def __init__(self, descriptor: DeviceDescriptor) -> None:
        self.descriptor = descriptor
        self.torch_device = cards.connect(descriptor.index, descriptor.total_memory_bytes)

    def set_up(self, config: EngineConfig, rank: int) -> None:
        descriptor = self.descriptor
        self.torch_device = cards.connect(descriptor.index + rank, descriptor.total_memory_bytes)

    def memory(self) -> MemoryInfo:
        memory = cards.memory_of(self.torch_device)
        return MemoryInfo(memory.total_bytes, memory.total_bytes - memory.used_bytes)
