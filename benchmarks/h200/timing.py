"""How a kernel is timed on the GPU: the median replay of a graph over buffers that together exceed the cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

CACHE_BYTES = 60 << 20
"""Second-level cache of an H200."""


def num_buffers(bytes_each: int) -> int:
    """How many sets of inputs a graph goes round, so that none is still in the cache when its turn comes again."""
    return max(2, min(64, math.ceil(4 * CACHE_BYTES / max(1, bytes_each))))


def seconds_per_call(calls: Sequence[Callable[[], object]], *, budget_s: float = 0.25) -> float:
    """Captures all calls in one graph; returns the median time of a replay over the number of calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        times: list[float] = []
        end = time.monotonic() + budget_s
        while len(times) < 10 or (len(times) < 100 and time.monotonic() < end):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[len(times) // 2] / len(calls)


def measured_limits() -> tuple[float, float]:
    """(bytes per second that are read, bf16 operations per second) of this card, now."""
    x = torch.empty(1 << 31, dtype=torch.bfloat16, device="cuda").normal_()
    total = torch.empty((), dtype=torch.float32, device="cuda")
    read = max(
        2 * x.numel() / seconds_per_call([partial(torch.sum, x, 0, dtype=torch.float32, out=total)]),
        2 * x.numel() / seconds_per_call([partial(x[: 1 << 30].copy_, x[1 << 30 :])]),
    )
    del x
    a, b = (torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    out = torch.empty_like(a)
    return read, 2 * 8192**3 / seconds_per_call([partial(torch.mm, a, b, out=out)])
