"""The device's runtime: which torch device a rank computes on, and how much of its memory is free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inferplane.api import DeviceDescriptor, DeviceRuntime, MemoryInfo
from inferplane.api.host_memory import host_memory

if TYPE_CHECKING:
    from inferplane.api.config import EngineConfig


class AcmeRuntime(DeviceRuntime):
    """Yours: import what registers the device with torch, and put its name for "cpu"."""

    def __init__(self, descriptor: DeviceDescriptor) -> None:
        self.descriptor = descriptor
        self.torch_device = torch.device("cpu")

    def set_up(self, config: EngineConfig, rank: int) -> None:
        """Yours: rank r of several takes the device r places after the selected one."""
        torch.manual_seed(config.seed)

    def memory(self) -> MemoryInfo:
        """Yours: of the device."""
        return host_memory()
