"""Devices as the core sees them: a description found by probing, and a runtime that moves bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

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


class Event(ABC):
    """A point in the work queued on a device."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the calling thread until everything queued before the point is done; raises what that work raised.
        May be called more than once."""


class HostCopy(Event):
    """A tensor on its way to host memory."""

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """The copy, complete: waits for it first."""


class Graph(ABC):
    """Work that was recorded once and is launched as a whole."""

    @abstractmethod
    def replay(self) -> None:
        """Queues the recorded work, which reads and writes the very tensors that it was recorded with."""


class GraphBackend(ABC):
    """Records what a device does, so that it can be launched again without the host's work for each kernel."""

    records_on_demand: ClassVar[bool] = False
    """Whether to record takes hardly longer than to run. Then a decode step of each batch size is recorded when it
    first comes up, without spare rows, instead of a ladder of sizes at the start."""

    def rehearse(self, runs: Sequence[Callable[[], object]]) -> None:
        """Called once, before the first of what ``runs`` compute is captured: a backend that compiles may do it for all
        together.

        It may call them, each rank alike. What they return and write counts for nothing, so that launches may be left
        out; nothing else is launched meanwhile.
        """
        return

    @abstractmethod
    def capture(self, run: Callable[[], None]) -> Graph:
        """Records ``run``, which the backend may call several times before (compilation, tuning) and while it records.

        ``run`` synchronises with nothing, gives its results by writing tensors that exist already, and its work does
        not depend on the host's values. What it allocates in between belongs to memory that all graphs of a backend
        share: only one of them runs at a time, so a ladder of graphs that begins with the largest needs no more than
        that one. Raises RuntimeError for what cannot be recorded.
        """


class CallAgain(GraphBackend):
    """Records nothing: a replay calls the function again. For tests of whoever uses graphs."""

    def capture(self, run: Callable[[], None]) -> Graph:
        run()
        return _CallAgainGraph(run)


class _CallAgainGraph(Graph):
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


class _WholeQueue(Event):
    """The point "now", for runtimes that have no finer event: waiting for it waits for all queued work."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime

    def wait(self) -> None:
        self._runtime.synchronize()


class _DoneCopy(HostCopy):
    def __init__(self, copied: torch.Tensor) -> None:
        self._copied = copied

    def wait(self) -> None:
        return

    def tensor(self) -> torch.Tensor:
        return self._copied


class DeviceRuntime(ABC):
    """Moves bytes to and from one device, and sets it up for a worker.

    A vendor must write `set_up` and `memory`. Everything below them has a default that is right for any device that
    torch can address; overriding them makes copies asynchronous, memory exact and steps cheap for the host.
    """

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

    def tear_down(self) -> None:
        """Called once when the worker is closed. Puts back what `set_up` changed of a process that may live on, as that
        of a program which used `LLM` does. Nothing to do where nothing was changed."""
        return

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

    def pin(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor in host memory, of the kind that the device copies from and to without the host's help."""
        import torch

        return torch.zeros(tuple(shape), dtype=dtype)

    def copy_to_device(self, out: torch.Tensor, host: torch.Tensor) -> None:
        """Copies a host tensor into one on the device, in the order of the queued work; may be asynchronous, so the
        host's may change only after an event that was recorded behind the copy."""
        out.copy_(host, non_blocking=True)

    def to_host_async(self, tensor: torch.Tensor) -> HostCopy:
        """Queues a copy to host memory. The tensor may be changed by work that is queued later."""
        # where memory is one, the tensor itself would be no copy
        return _DoneCopy(tensor.clone() if self.is_host_memory else self.to_host(tensor))

    def record_event(self) -> Event:
        """The point that the queued work has now reached."""
        return _WholeQueue(self)

    def graphs(self) -> GraphBackend | None:
        """A new recorder of graphs with memory of its own; None where the device has no such thing."""
        return None

    def measure_peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Calls ``run`` and returns how far its tensors, at their most, exceeded what was allocated before; memory that
        the allocator would keep for reuse is given back afterwards. None, with nothing called, where that is not known.
        """
        return None

    def profile(self, run: Callable[[], object]) -> str | None:
        """Calls ``run`` under the device's profiler; returns a report for people: the share of the time in which the
        device was busy, and its most expensive kernels. None, with nothing called, where there is no profiler."""
        return None
