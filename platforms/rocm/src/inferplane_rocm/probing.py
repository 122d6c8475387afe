"""Which GPUs this process may use, and what each can do. Imports no torch and initialises no device."""

from __future__ import annotations

import os

from inferplane.api import CapabilitySet, DeviceDescriptor, Supported, Unsupported
from inferplane_rocm.topology import DriverError, Gpu, read_gpus
from inferplane_torch_accelerator.torch_build import why_not_built_for
from inferplane_torch_accelerator.visible_devices import visible

PLATFORM = "rocm"
SCORE = 100
VISIBLE_TO_DRIVER = "ROCR_VISIBLE_DEVICES"
"""Numbers or UUIDs, among all GPUs."""
VISIBLE_TO_RUNTIME = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Numbers among what the driver's list leaves; the first of them that is set counts."""

_MATRIX = ("graph_capture", "fp16_matmul", "bf16_matmul", "int8_matmul")
_WAVE64 = (*_MATRIX, "wave64")
_FP8 = ("fp8_e4m3_matmul", "fp8_e5m2_matmul")
_FP8_FNUZ = ("fp8_e4m3fnuz_matmul", "fp8_e5m2fnuz_matmul")
"""The numbers of gfx942 have no negative zero, and half the exponent bias: not the formats that checkpoints are in."""

ARCHITECTURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "gfx908": ("Instinct MI100", _WAVE64),
    "gfx90a": ("Instinct MI200", _WAVE64),
    "gfx942": ("Instinct MI300", (*_WAVE64, *_FP8_FNUZ)),
    "gfx950": ("Instinct MI350", (*_WAVE64, *_FP8, "mxfp4_matmul")),
    "gfx1100": ("Radeon RX 7900", _MATRIX),
    "gfx1101": ("Radeon RX 7800", _MATRIX),
    "gfx1102": ("Radeon RX 7600", _MATRIX),
    "gfx1150": ("Radeon 890M", _MATRIX),
    "gfx1151": ("Radeon 8060S", _MATRIX),
    "gfx1200": ("Radeon RX 9060", (*_MATRIX, *_FP8)),
    "gfx1201": ("Radeon RX 9070", (*_MATRIX, *_FP8)),
}
"""Those with units for matrix products: family and capabilities of each."""


def probe() -> Supported | Unsupported:
    """The usable GPUs of this process, or why there are none."""
    try:
        gpus = visible_gpus(read_gpus())
    except DriverError as error:
        return Unsupported(PLATFORM, str(error))
    if not gpus:
        return Unsupported(PLATFORM, _why_none())
    if reason := why_not_built_for("hip", "ROCm"):
        return Unsupported(PLATFORM, reason)
    devices = tuple(
        describe(gpu, index) for index, gpu in enumerate(gpus) if gpu.architecture in ARCHITECTURES
    )
    if not devices:
        return Unsupported(
            PLATFORM, f"the GPU is a {gpus[0].architecture}; one of {', '.join(ARCHITECTURES)} is needed"
        )
    return Supported(PLATFORM, SCORE, devices)


def visible_gpus(gpus: list[Gpu]) -> list[Gpu]:
    """What the environment leaves of ``gpus``, in the order in which torch will count them."""
    left = visible(gpus, os.environ.get(VISIBLE_TO_DRIVER), lambda gpu: gpu.uuid)
    name = _runtime_variable()
    return visible(left, os.environ[name]) if name else left


def describe(gpu: Gpu, index: int) -> DeviceDescriptor:
    family, capabilities = ARCHITECTURES[gpu.architecture]
    name = f"AMD {family} ({gpu.architecture}, {gpu.num_compute_units} compute units)"
    return DeviceDescriptor(PLATFORM, index, name, gpu.total_memory_bytes, CapabilitySet(capabilities))


def _runtime_variable() -> str | None:
    return next((name for name in VISIBLE_TO_RUNTIME if name in os.environ), None)


def _why_none() -> str:
    names = [name for name in (VISIBLE_TO_DRIVER, _runtime_variable()) if name and name in os.environ]
    if not names:
        return "the AMD GPU driver is there, but it shows this process no GPU"
    settings = " and ".join(f"{name}={os.environ[name]!r}" for name in names)
    return (
        f"{settings} leaves no GPU to this process"
        if len(names) == 1
        else f"{settings} leave no GPU to this process"
    )
