"""Kernels written in the CuTe DSL: compiled in the background while weights are loaded, and kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cute-dsl")
"""A single one: the compiler is not made for several at a time."""
_compiling: dict[Hashable, Future[None]] = {}


def start_compiling(kernel: Hashable, launch: Callable[[], None], device: torch.device) -> None:
    """Once for each ``kernel``; ``launch`` makes a small call of it. What goes wrong does so again, and is seen, where
    the kernel is needed."""
    if kernel not in _compiling:
        _compiling[kernel] = _thread.submit(_compile, launch, device)


def wait() -> None:
    """Until nothing is being compiled."""
    if not all(future.done() for future in _compiling.values()):
        for future in list(_compiling.values()):
            future.exception()


def _compile(launch: Callable[[], None], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    with torch.inference_mode():
        launch()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # of the device would disturb a thread that records


def cache_folder(library: str) -> Path | None:
    """A folder of the user's own for what ``library`` compiled; None where there can be none: in a read-only home."""
    parent = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(parent) if parent else Path.home() / ".cache") / "inferplane" / library
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder
