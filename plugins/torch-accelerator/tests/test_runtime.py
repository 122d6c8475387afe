"""The runtime and its graphs over a device module made for the purpose; on real devices the platforms' tests run it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from inferplane.api import DeviceDescriptor
from inferplane.api.config import EngineConfig
from inferplane.config import DeviceConfig, ModelConfig
from inferplane_torch_accelerator.graphs import AcceleratorGraphs, can_record
from inferplane_torch_accelerator.runtime import AcceleratorRuntime

MIB = 1 << 20


class Recorder:
    """What `CUDAGraph` is: knows whether it records, and what was done meanwhile."""

    def __init__(self, module: DeviceModule) -> None:
        self._module = module

    def capture_begin(self, pool: object, **how: object) -> None:
        self._module.log.append(("begin", pool, how))

    def capture_end(self) -> None:
        self._module.log.append("end")

    def replay(self) -> None:
        self._module.log.append("replay")


class DeviceModule:
    """In the place of `torch.cuda` or `torch.xpu`."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.allocated = self.peak = 10 * MIB
        self.reserved = 16 * MIB
        self.CUDAGraph = self.XPUGraph = lambda: Recorder(self)

    def set_device(self, device: torch.device) -> None:
        self.log.append(("current", str(device)))

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 100 * MIB, 200 * MIB

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def memory_allocated(self, device: torch.device) -> int:
        return self.allocated

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.allocated

    def empty_cache(self) -> None:
        self.log.append("empty")

    def synchronize(self, device: torch.device | None = None) -> None:
        self.log.append("wait")

    def graph_pool_handle(self) -> str:
        return "pool"

    def Stream(self, device: torch.device) -> DeviceModule:
        return self

    @contextmanager
    def stream(self, stream: DeviceModule) -> Iterator[None]:
        yield


class AcmeRuntime(AcceleratorRuntime):
    device_type = "xpu"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> DeviceModule:
    module = DeviceModule()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


@pytest.fixture
def runtime(module: DeviceModule) -> AcmeRuntime:
    return AcmeRuntime(DeviceDescriptor("acme", 2, "", 200 * MIB))


def config(num_threads: int | None = None) -> EngineConfig:
    model = ModelConfig("m", "/m", {}, "A", "float16", 128, 100)
    return EngineConfig(model, DeviceConfig("acme", num_threads=num_threads))


def test_a_rank_has_the_device_that_many_places_on(runtime: AcmeRuntime, module: DeviceModule) -> None:
    assert runtime.torch_device == torch.device("xpu", 2)
    runtime.set_up(config(), rank=1)
    assert runtime.torch_device == torch.device("xpu", 3)
    assert module.log == [("current", "xpu:3")]
    assert not runtime.is_host_memory


def test_threads_are_put_back(runtime: AcmeRuntime) -> None:
    before = torch.get_num_threads()
    try:
        runtime.set_up(config(num_threads=before + 1), rank=0)
        assert torch.get_num_threads() == before + 1
        runtime.tear_down()
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(before)


def test_what_the_allocator_holds_unused_is_available(runtime: AcmeRuntime) -> None:
    memory = runtime.memory()
    assert (memory.available_bytes, memory.total_bytes) == ((100 + 6) * MIB, 200 * MIB)


def test_the_peak_is_above_what_was_there(runtime: AcmeRuntime, module: DeviceModule) -> None:
    def run() -> None:
        module.peak = module.allocated + 7 * MIB

    assert runtime.measure_peak_bytes(run) == 7 * MIB
    assert module.log == ["wait", "empty", "wait", "empty"]


@pytest.mark.parametrize(
    ("device_type", "how"), [("cuda", {"capture_error_mode": "thread_local"}), ("xpu", {})]
)
def test_a_graph_records_the_second_run(module: DeviceModule, device_type: str, how: dict[str, str]) -> None:
    graphs = AcceleratorGraphs(torch.device(device_type, 0))
    collects: list[bool] = []

    def run() -> None:
        module.log.append("run")
        collects.append(gc.isenabled())

    graph = graphs.capture(run)
    assert module.log == ["wait", "run", "wait", ("begin", "pool", how), "run", "end", "wait"]
    assert collects == [False, False] and gc.isenabled()
    graph.replay()
    assert module.log[-1] == "replay"


def test_what_cannot_be_recorded_ends_the_recording(module: DeviceModule) -> None:
    runs: list[Callable[[], None]] = []

    def run() -> None:
        runs.append(run)
        if len(runs) == 2:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        AcceleratorGraphs(torch.device("cuda", 0)).capture(run)
    assert module.log[-1] == "end" and gc.isenabled()


def test_who_records(module: DeviceModule) -> None:
    assert can_record("cuda") and can_record("xpu")
    del module.XPUGraph
    assert not can_record("xpu") and not can_record("acme")
