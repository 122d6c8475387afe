"""Which GPUs this process may use, and what each can do. Imports no torch and initialises no device."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

from inferplane.api import CapabilitySet, DeviceDescriptor, Supported, Unsupported
from inferplane_cuda.nvml import DriverError, Gpu, read_gpus

PLATFORM = "cuda"
SCORE = 100
VISIBLE = "CUDA_VISIBLE_DEVICES"
LEAST_COMPUTE_CAPABILITY = (7, 5)
"""What torch is built for since CUDA 13."""

_CAPABILITIES: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = (
    ((7, 5), ("graph_capture", "fp16_matmul", "int8_matmul")),
    ((8, 0), ("bf16_matmul",)),
    ((8, 9), ("fp8_e4m3_matmul",)),
    ((9, 0), ("bulk_tensor_copy", "warpgroup_matmul")),
)
"""From which compute capability on a GPU has what."""


def probe() -> Supported | Unsupported:
    """The usable GPUs of this process, or why there are none."""
    try:
        gpus = visible(read_gpus(), os.environ.get(VISIBLE))
    except DriverError as error:
        return Unsupported(PLATFORM, str(error))
    if not gpus:
        return Unsupported(PLATFORM, _why_none())
    if reason := torch_reason():
        return Unsupported(PLATFORM, reason)
    devices = tuple(describe(gpu, index) for index, gpu in enumerate(gpus) if is_new_enough(gpu))
    if not devices:
        least, (major, minor) = LEAST_COMPUTE_CAPABILITY, gpus[0].compute_capability
        return Unsupported(
            PLATFORM,
            f"{gpus[0].name} has compute capability {major}.{minor}; at least {least[0]}.{least[1]} is needed",
        )
    return Supported(PLATFORM, SCORE, devices)


def visible(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """What is left of ``gpus`` under a value of CUDA_VISIBLE_DEVICES, in the order that torch will count them.

    As the driver does, entries are numbers or beginnings of UUIDs, and the first that names no GPU ends the list.
    """
    if setting is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in map(str.strip, setting.split(",")):
        gpu = _named(gpus, entry)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return chosen


def is_new_enough(gpu: Gpu) -> bool:
    return gpu.compute_capability >= LEAST_COMPUTE_CAPABILITY


def describe(gpu: Gpu, index: int) -> DeviceDescriptor:
    names = [name for least, some in _CAPABILITIES if gpu.compute_capability >= least for name in some]
    return DeviceDescriptor(PLATFORM, index, gpu.name, gpu.total_memory_bytes, CapabilitySet(names))


def torch_reason() -> str | None:
    """Why the installed torch cannot use a GPU of this kind; None when it can. Read from its files, not by import."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None  # an unusual build: importing it will tell
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*(\S+)", text, re.MULTILINE)
    if cuda is None or cuda[1] == "None":
        name = f"torch {version[1]}" if version else "torch"
        return f"{name} is built without CUDA; install a torch build for CUDA"
    return None


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdigit():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    matches = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _why_none() -> str:
    setting = os.environ.get(VISIBLE)
    if setting is not None:
        return f"{VISIBLE}={setting!r} leaves no GPU to this process"
    return "the NVIDIA driver is there, but it finds no GPU"
