"""The host as a device: threads, placement and memory."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch

from inferplane.api import DeviceDescriptor, DeviceRuntime, MemoryInfo
from inferplane.api.host_memory import host_memory
from inferplane_cpu.cores import allowed_cores, usable_cores

if TYPE_CHECKING:
    from inferplane.api.config import EngineConfig

logger = logging.getLogger("inferplane.cpu")


class CpuRuntime(DeviceRuntime):
    def __init__(self, descriptor: DeviceDescriptor) -> None:
        self.descriptor = descriptor
        self.torch_device = torch.device("cpu")

    def set_up(self, config: EngineConfig, rank: int) -> None:
        """Gives the rank its share of the cores. A single rank is left to the system's scheduler."""
        world_size = config.parallel.world_size
        num_threads = config.device.num_threads or _openmp_threads() or max(1, usable_cores() // world_size)
        if world_size > 1:
            _bind(rank, world_size)
        torch.set_num_threads(num_threads)
        torch.manual_seed(config.seed)

    def memory(self) -> MemoryInfo:
        return host_memory()

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host  # it is there already


def _openmp_threads() -> int | None:
    """What the user asked of every OpenMP program, or None. A list is for nested regions; its first entry counts."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(asked) if asked.isdigit() and int(asked) > 0 else None


def _bind(rank: int, world_size: int) -> None:
    """Keeps the ranks off each other's cores, where the system lets us."""
    cores = allowed_cores()
    share = len(cores) // world_size
    if share == 0:
        return
    mine = cores[rank * share : (rank + 1) * share]
    try:
        os.sched_setaffinity(0, mine)
    except (AttributeError, OSError) as error:
        logger.warning(
            "rank %d could not be bound to cores %s (%s); it runs unbound, on any core", rank, mine, error
        )
