"""Graphs: a step's kernels recorded once and launched as one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inferplane.api import Graph, GraphBackend
from inferplane_torch_accelerator.compile_together import compile_together

# Of the device's module, with the arguments that its `capture_begin` takes beside the pool. Errors of this thread only:
# another may watch over collectives while this one records.
_GRAPH_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "cuda": ("CUDAGraph", {"capture_error_mode": "thread_local"}),
    "xpu": ("XPUGraph", {}),
}


def can_record(device_type: str) -> bool:
    """Whether the installed torch records graphs on devices of this type."""
    name, _ = _GRAPH_TYPES.get(device_type, ("", {}))
    return hasattr(torch.get_device_module(device_type), name)


class AcceleratorGraphs(GraphBackend):
    """Records on a stream of its own, into memory that all its graphs share. Replays go to the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._pool = self._module.graph_pool_handle()

    def rehearse(self, runs: Sequence[Callable[[], object]]) -> None:
        """Compiles what they launch of Triton's kernels, side by side."""
        with self._module.stream(self._stream):
            compile_together(runs, self._device)
        self._module.synchronize(self._device)

    def capture(self, run: Callable[[], None]) -> Graph:
        """Calls ``run`` once unrecorded, for compilation and for what libraries allocate, and once recorded."""
        self._module.synchronize(self._device)
        name, how = _GRAPH_TYPES[self._device.type]
        graph = getattr(self._module, name)()
        collects = gc.isenabled()
        gc.disable()  # a collection while recording could free device memory, which cannot be recorded
        try:
            with self._module.stream(self._stream):
                run()
                self._stream.synchronize()
                graph.capture_begin(pool=self._pool, **how)
                try:
                    run()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self._module.synchronize(self._device)
        return RecordedGraph(graph)


class RecordedGraph(Graph):
    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()
