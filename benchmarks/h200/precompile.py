"""Compiles the candidates of a tuning command in many processes at once, into Triton's cache.

One after another, as they are measured, they would take a second or more each, and most of the time that a GPU is lent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch

Task = TypeVar("Task")
MAX_PROCESSES = 14


def precompile(launch: Callable[[Task], object], tasks: Sequence[Task]) -> None:
    """``launch``, a function of a module, launches a task's kernel on tensors of torch's meta device. One that fails is
    left to be compiled, and to fail again, where it is measured."""
    started = time.monotonic()
    target = "cuda:" + "".join(map(str, torch.cuda.get_device_capability()))
    num_processes = min(MAX_PROCESSES, os.cpu_count() or 1, len(tasks))
    with ProcessPoolExecutor(num_processes, get_context("spawn")) as pool:
        errors = list(pool.map(_compile, [launch] * len(tasks), tasks, [target] * len(tasks)))
    failed = [error for error in errors if error]
    print(
        f"compiled {len(tasks)} in {time.monotonic() - started:.1f} s, {len(failed)} failed",
        *failed[:3],
        flush=True,
    )


def _compile(launch: Callable[[Task], object], task: Task, target: str) -> str | None:
    from inferplane_kernels_triton.compile_only import compile_only, parse_target

    try:
        with compile_only(parse_target(target)):
            launch(task)
    except Exception as error:
        return f"{task}: {type(error).__name__}: {str(error)[:160]}"
    return None


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
