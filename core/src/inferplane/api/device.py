"""Devices as the core sees them: a description found by probing, and a runtime that moves bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from inferplane.config import EngineConfig


class CapabilitySet:
    """What a device can do, asked by name: ``caps.has("bf16_matmul")``. Never by vendor or chip number.

    Names in use: ``bf16_matmul``, ``fp16_matmul`` (a native matrix product faster than float32's),
    ``graph_capture``, ``int8_matmul``, ``fp8_e4m3_matmul``. A platform may add its own.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)

    def has(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CapabilitySet) and self._names == other._names

    def __hash__(self) -> int:
        return hash(self._names)

    def __repr__(self) -> str:
        return f"CapabilitySet({sorted(self._names)})"


@dataclass(frozen=True)
class DeviceDescriptor:
    """One device that a platform found."""

    platform: str
    """Name of the plugin that serves it; what ``--device`` takes."""
    index: int
    name: str
    """For people: what the device calls itself."""
    total_memory_bytes: int
    capabilities: CapabilitySet = field(default_factory=CapabilitySet)


@dataclass(frozen=True)
class Supported:
    """Answer of `probe_devices`: these devices are here and usable. The highest score is the default."""

    platform: str
    score: int
    """0 is the reference platform, 10 a plain CPU, 100 an accelerator."""
    devices: tuple[DeviceDescriptor, ...]


@dataclass(frozen=True)
class Unsupported:
    """Answer of `probe_devices`: not on this machine, and why, in words that help."""

    platform: str
    reason: str


@dataclass(frozen=True)
class MemoryInfo:
    total_bytes: int
    available_bytes: int
    """What may still be allocated, limits of containers included."""


class DeviceRuntime(ABC):
    """Moves bytes to and from one device, and sets it up for a worker."""

    descriptor: DeviceDescriptor
    torch_device: torch.device

    @property
    def is_host_memory(self) -> bool:
        """Whether the device's tensors lie in the machine's own memory, which everything that runs there shares."""
        return bool(self.torch_device.type == "cpu")

    @abstractmethod
    def set_up(self, config: EngineConfig, rank: int) -> None:
        """Called once in the worker before anything is allocated: threads, placement, seeds.

        What cannot be had (a privilege, say) is logged as one warning with the fallback, and never fatal.
        """

    @abstractmethod
    def memory(self) -> MemoryInfo: ...

    def synchronize(self) -> None:
        """Waits until all queued work is done. Nothing to do where work is synchronous."""
        return

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the device of a tensor in host memory; may be asynchronous. May alias it where memory is one."""
        return host.to(self.torch_device, non_blocking=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory that is complete on return."""
        return tensor.to("cpu")
