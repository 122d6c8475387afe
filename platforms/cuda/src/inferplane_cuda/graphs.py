"""CUDA graphs: a step's kernels recorded once and launched as one."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from inferplane.api import Graph, GraphBackend


class CudaGraphs(GraphBackend):
    """Records on a stream of its own, into memory that all its graphs share. Replays go to the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Graph:
        """Calls ``run`` once unrecorded, for compilation and for what libraries allocate, and once recorded."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a collection while recording could free device memory, which cannot be recorded
        try:
            with torch.cuda.stream(self._stream):
                run()
                self._stream.synchronize()
                # errors of this thread only: another may watch over collectives meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.synchronize(self._device)
        return CudaGraph(graph)


class CudaGraph(Graph):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()
