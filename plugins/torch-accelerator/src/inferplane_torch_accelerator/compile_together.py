"""Triton kernels compiled side by side: one after another, as they come up, they make most of a first start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MAX_THREADS = 16
"""The compiler leaves the interpreter's lock alone for most of its work, and its assembler is a process."""

logger = logging.getLogger("inferplane.graphs")


def compile_together(runs: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Calls ``runs`` in a way that Triton's kernels which are not compiled yet are noted and left out, then compiles
    those in threads. What the runs write means nothing; whatever fails is left to be compiled where it is needed."""
    try:
        from triton import knobs

        previous = knobs.runtime.jit_cache_hook
    except (ImportError, AttributeError):  # none, or one without them
        return
    noted: dict[tuple[Any, str], str] = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        noted[fn.jit_function, key] = compile["specialization_data"]
        return True  # Triton neither compiles nor launches it

    knobs.runtime.jit_cache_hook = note
    try:
        with _ZerosForEmpty():
            for run in runs:
                run()
    except Exception as error:
        logger.debug("kernels are compiled one by one, as their launches could not be noted: %r", error)
    finally:
        knobs.runtime.jit_cache_hook = previous
    if noted:
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1, len(noted))) as pool:
            for (kernel, _), call in noted.items():
                pool.submit(_compile, kernel, call, device)


def _compile(kernel: Any, call: str, device: torch.device) -> None:
    try:
        torch.get_device_module(device).set_device(device)  # of this thread
        kernel.preload(call)
    except Exception as error:
        logger.debug("%s is compiled where it is needed: %r", kernel, error)


class _ZerosForEmpty(TorchDispatchMode):
    """New memory is zeros, so that what kernels left unwritten is no index out of bounds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _EMPTY:
            result.zero_()
        return result


_EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}
