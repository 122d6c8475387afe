"""Level 2's other questions: who serves each op (``--mode support``), and how long a call takes (``--mode perf``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from inferplane.api.ops import OPS, Op
from inferplane.config.engine import DTYPES
from inferplane_conformance.providers import op_decision, op_implementations
from inferplane_conformance.subject import Subject

ROUND_S = 0.02
NUM_ROUNDS = 5
SUPPORT_COLUMNS = ("op", "dtype", "provider", "rejected")
PERF_COLUMNS = ("op", "dtype", "provider", "us", "reference_us")


def support_rows(subject: Subject) -> Iterator[dict[str, Any]]:
    """Of each op and type that the platform takes: who won, and why others could not; else why it is refused."""
    for op in OPS:
        for name in DTYPES:
            dtype = getattr(torch, name)
            if fault := subject.dtype_fault(dtype):
                yield {"op": op, "dtype": name, "provider": None, "rejected": fault}
                continue
            decision = op_decision(subject, op, dtype)
            rejected = [f"{each.name}: {each.reason}" for each in decision.candidates if each.reason]
            provider = decision.chosen.name
            yield {"op": op, "dtype": name, "provider": provider, "rejected": "; ".join(rejected) or None}


@torch.inference_mode()
def perf_rows(subject: Subject) -> Iterator[dict[str, Any]]:
    """Microseconds of a call at the shapes of the op's own example, which are small: mostly what a launch costs."""
    for name, op in OPS.items():
        for dtype_name in DTYPES:
            dtype = getattr(torch, dtype_name)
            if subject.dtype_fault(dtype):
                continue
            reference_us = time_call_us(subject, op, op.reference, dtype)
            for provider, function in op_implementations(subject, name, dtype).items():
                us = reference_us if function is op.reference else time_call_us(subject, op, function, dtype)
                row = {"op": name, "dtype": dtype_name, "provider": provider}
                yield {**row, "us": us, "reference_us": reference_us}


def time_call_us(subject: Subject, op: Op, function: Callable[..., Any], dtype: torch.dtype) -> float:
    """The median of a few rounds of calls one after another, the device's work included."""
    runtime = subject.runtime
    arguments = [
        runtime.to_device(each) if isinstance(each, torch.Tensor) else each
        for each in op.example_inputs(torch.Generator().manual_seed(0), dtype)
    ]

    def seconds(num_calls: int) -> float:
        runtime.synchronize()
        started_s = time.perf_counter()
        for _ in range(num_calls):
            function(*arguments)
        runtime.synchronize()
        return time.perf_counter() - started_s

    seconds(1)  # what is compiled or loaded on first use is no part of a call
    num_calls = max(1, int(ROUND_S / max(seconds(1), 1e-6)))
    return round(median(seconds(num_calls) / num_calls for _ in range(NUM_ROUNDS)) * 1e6, 1)
