"""What the device did while something ran: how busy it was, and with which kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

MAX_ROWS = 40
MAX_NAME = 90


@dataclass(frozen=True)
class KernelRun:
    """One piece of work on the device; times in microseconds of one clock."""

    name: str
    start_us: float
    end_us: float


def record(run: Callable[[], object], device_type: str) -> list[KernelRun]:
    """Every kernel, copy and fill that ran during ``run`` on devices of a type that torch's profiler knows."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[getattr(ProfilerActivity, device_type.upper())]) as profiler:
        run()
        torch.get_device_module(device_type).synchronize()
    there = getattr(torch.autograd.DeviceType, device_type.upper())
    return [
        KernelRun(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == there
    ]


def report(runs: list[KernelRun]) -> str:
    """A text for people: the busy share between the first and the last kernel, then kernels by their time."""
    if not runs:
        return "nothing ran on the device"
    span_us = max(run.end_us for run in runs) - min(run.start_us for run in runs)
    busy = busy_us(runs)
    share = busy / max(span_us, 1e-9)
    lines = [f"device busy {busy / 1e3:.2f} ms of {span_us / 1e3:.2f} ms ({share:.1%}), {len(runs)} launches"]
    totals: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for run in runs:
        total, count = totals[run.name]
        totals[run.name] = total + run.end_us - run.start_us, count + 1
    ranked = sorted(totals.items(), key=lambda item: -item[1][0])
    lines.append(f"{'ms':>10} {'share':>6} {'calls':>7} {'us each':>9}  kernel")
    for name, (total, count) in ranked[:MAX_ROWS]:
        lines.append(
            f"{total / 1e3:10.3f} {total / busy:6.1%} {count:7} {total / count:9.2f}  {name[:MAX_NAME]}"
        )
    return "\n".join(lines)


def busy_us(runs: Iterable[KernelRun]) -> float:
    """Time in which at least one of them ran."""
    total, reached = 0.0, float("-inf")
    for run in sorted(runs, key=lambda run: run.start_us):
        if run.end_us > reached:
            total += run.end_us - max(run.start_us, reached)
            reached = run.end_us
    return total
