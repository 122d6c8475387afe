"""Which GPUs this process may use, and what each can do. Imports no torch and initialises no device."""

from __future__ import annotations

import os

from inferplane.api import CapabilitySet, DeviceDescriptor, Supported, Unsupported
from inferplane_cuda.nvml import DriverError, Gpu, read_gpus
from inferplane_torch_accelerator.torch_build import why_not_built_for
from inferplane_torch_accelerator.visible_devices import visible

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
        gpus = visible(read_gpus(), os.environ.get(VISIBLE), lambda gpu: gpu.uuid)
    except DriverError as error:
        return Unsupported(PLATFORM, str(error))
    if not gpus:
        return Unsupported(PLATFORM, _why_none())
    if reason := why_not_built_for("cuda", "CUDA"):
        return Unsupported(PLATFORM, reason)
    devices = tuple(describe(gpu, index) for index, gpu in enumerate(gpus) if is_new_enough(gpu))
    if not devices:
        least, (major, minor) = LEAST_COMPUTE_CAPABILITY, gpus[0].compute_capability
        return Unsupported(
            PLATFORM,
            f"{gpus[0].name} has compute capability {major}.{minor}; at least {least[0]}.{least[1]} is needed",
        )
    return Supported(PLATFORM, SCORE, devices)


def is_new_enough(gpu: Gpu) -> bool:
    return gpu.compute_capability >= LEAST_COMPUTE_CAPABILITY


def describe(gpu: Gpu, index: int) -> DeviceDescriptor:
    names = [name for least, some in _CAPABILITIES if gpu.compute_capability >= least for name in some]
    return DeviceDescriptor(PLATFORM, index, gpu.name, gpu.total_memory_bytes, CapabilitySet(names))


def _why_none() -> str:
    setting = os.environ.get(VISIBLE)
    if setting is not None:
        return f"{VISIBLE}={setting!r} leaves no GPU to this process"
    return "the NVIDIA driver is there, but it finds no GPU"
