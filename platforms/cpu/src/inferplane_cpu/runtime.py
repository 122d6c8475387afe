"""The host as a device: threads, placement and memory."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from inferplane.api import DeviceDescriptor, DeviceRuntime, GraphBackend, MemoryInfo
from inferplane.api.host_memory import host_memory
from inferplane_cpu.cores import allowed_cores, usable_cores
from inferplane_cpu.graphs import CpuGraphs
from inferplane_kernels_cpu import native

if TYPE_CHECKING:
    from inferplane.api.config import EngineConfig

logger = logging.getLogger("inferplane.cpu")


@dataclass(frozen=True)
class Binding:
    """Cores that a thread was kept to, and those that it had before."""

    thread_id: int
    cores_before: list[int]

    def undo(self) -> None:
        # the thread may be gone, and this may be another one
        with suppress(OSError):
            os.sched_setaffinity(self.thread_id, self.cores_before)


class CpuRuntime(DeviceRuntime):
    def __init__(self, descriptor: DeviceDescriptor) -> None:
        self.descriptor = descriptor
        self.torch_device = torch.device("cpu")
        self._num_threads_before: int | None = None
        self._binding: Binding | None = None

    def set_up(self, config: EngineConfig, rank: int) -> None:
        """Gives the rank its share of the cores. A single rank is left to the system's scheduler."""
        world_size = config.parallel.world_size
        num_threads = config.device.num_threads or _openmp_threads() or max(1, usable_cores() // world_size)
        if world_size > 1:
            self._binding = _bind(rank, world_size)
        self._num_threads_before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        _set_up_native(num_threads)
        torch.manual_seed(config.seed)

    def tear_down(self) -> None:
        if self._num_threads_before is not None:
            torch.set_num_threads(self._num_threads_before)
        if self._binding is not None:
            self._binding.undo()
        self._num_threads_before = self._binding = None

    def memory(self) -> MemoryInfo:
        return host_memory()

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host  # it is there already

    def graphs(self) -> GraphBackend | None:
        return CpuGraphs() if native.unavailable_reason() is None else None


def _set_up_native(num_threads: int) -> None:
    """Threads of the native kernels, once the rank is on its cores; or what is missing, in one line."""
    reason = native.unavailable_reason()
    if reason is None:
        native.set_num_threads(num_threads)
        logger.info("native kernels: %s, %d threads", native.level(), num_threads)
    else:
        logger.warning("no native kernels, torch's operators serve: %s", reason)


def _openmp_threads() -> int | None:
    """What the user asked of every OpenMP program, or None. A list is for nested regions; its first entry counts."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(asked) if asked.isdigit() and int(asked) > 0 else None


def _bind(rank: int, world_size: int) -> Binding | None:
    """Keeps the ranks off each other's cores, where the system lets us. None where it does not."""
    cores = allowed_cores()
    share = len(cores) // world_size
    if share == 0:
        return None
    mine = cores[rank * share : (rank + 1) * share]
    try:
        os.sched_setaffinity(0, mine)
    except (AttributeError, OSError) as error:
        logger.warning(
            "rank %d could not be bound to cores %s (%s); it runs unbound, on any core", rank, mine, error
        )
        return None
    return Binding(threading.get_native_id(), cores)
