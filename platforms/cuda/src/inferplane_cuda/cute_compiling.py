"""Kernels written in the CuTe DSL: compiled in the background while weights are loaded, and kept on disk.

Its compiler is Python, which takes turns with everything else in the process. So what was never compiled on the machine
is compiled by processes of their own, one for each library, and read from disk afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from inferplane_cuda.cute_process import CompilingProcess

LEAST_PROCESSORS = 8
"""With fewer a process that imports everything again takes more time than it saves."""
PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "torch")
"""Another version of any of them may compile anew."""

_threads: dict[str, ThreadPoolExecutor] = defaultdict(
    partial(ThreadPoolExecutor, max_workers=1, thread_name_prefix="cute-dsl")
)
"""By library."""
_processes: dict[str, CompilingProcess] = {}
_compiler = threading.Lock()
"""Within a process it is not made for several at a time."""
_compiling: dict[Hashable, Future[None]] = {}


def start_compiling(
    kernel: Hashable,
    launch: Callable[[], None],
    device: torch.device,
    library: str,
    task: Mapping[str, Any],
) -> None:
    """Once for each ``kernel``; ``launch`` makes a small call of it. What goes wrong does so again, and is seen, where
    the kernel is needed. ``library`` and ``task``, which is JSON, say the same to `cute_process`."""
    if kernel not in _compiling:
        _compiling[kernel] = _threads[library].submit(_compile, launch, device, library, task)


def wait() -> None:
    """Until nothing is being compiled."""
    if not all(future.done() for future in _compiling.values()):
        for future in list(_compiling.values()):
            future.exception()
        while _processes:
            _processes.popitem()[1].close()


def _compile(launch: Callable[[], None], device: torch.device, library: str, task: Mapping[str, Any]) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    if (os.cpu_count() or 1) >= LEAST_PROCESSORS:
        _compile_in_process(device, library, task)
    with _compiler, torch.inference_mode():
        launch()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # of the device would disturb a thread that records


def _compile_in_process(device: torch.device, library: str, task: Mapping[str, Any]) -> None:
    note = _note_of(device, library, task)
    if note is None or note.exists():
        return
    if library not in _processes:
        _processes[library] = CompilingProcess(library, device)
    if _processes[library].compile(task):
        note.touch()


def _note_of(device: torch.device, library: str, task: Mapping[str, Any]) -> Path | None:
    """A file that is there once a process has compiled this; None where compiled kernels cannot be kept."""
    folder = cache_folder("compiled")
    if folder is None:
        return None
    gpu = torch.cuda.get_device_capability(device) if device.type == "cuda" else ()
    facts = [library, task, gpu, [_version(package) for package in PACKAGES]]
    return folder / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cache_folder(library: str) -> Path | None:
    """A folder of the user's own for what ``library`` compiled; None where there can be none: in a read-only home."""
    parent = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(parent) if parent else Path.home() / ".cache") / "inferplane" / library
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder
