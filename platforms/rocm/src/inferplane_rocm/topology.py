"""The GPUs that the kernel driver shows in sysfs: no torch, no library, and no device is touched."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
DRIVER_DEVICE = Path("/dev/kfd")
_DEVICE_MEMORY_HEAPS = (1, 2)
"""Kinds of memory banks that are the GPU's own: visible to the host, and not."""


class DriverError(RuntimeError):
    """The driver is missing or does not let this process in; the message says which, in words for people."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it."""

    uuid: str
    """As ROCR_VISIBLE_DEVICES takes it; empty for GPUs that have none."""
    architecture: str
    """``gfx942``; the compiler's name of the instruction set."""
    num_compute_units: int
    wavefront_size: int
    total_memory_bytes: int


def read_gpus(sysfs: Path = SYSFS, driver_device: Path = DRIVER_DEVICE) -> list[Gpu]:
    """Every GPU that this process is let to, in the order in which the runtime counts them. Raises `DriverError`."""
    nodes = sysfs / "class/kfd/kfd/topology/nodes"
    if not nodes.is_dir():
        raise DriverError(f"no AMD GPU driver on this machine ({nodes} was not found)")
    if not driver_device.exists():
        raise DriverError(
            f"the AMD GPU driver is there, but {driver_device} is not; start the container with the devices "
            f"{driver_device} and /dev/dri"
        )
    if not os.access(driver_device, os.R_OK | os.W_OK):
        raise DriverError(
            f"no permission on {driver_device}; add the user to the group that owns it (render, or video)"
        )
    numbered = sorted((int(node.name), node) for node in nodes.iterdir() if node.name.isdigit())
    found = [_read_gpu(node) for _, node in numbered]
    return [gpu for gpu in found if gpu is not None]


def driver_version(sysfs: Path = SYSFS) -> str | None:
    """Of the kernel module; None for the one that comes with the kernel and has no version of its own."""
    try:
        return (sysfs / "module/amdgpu/version").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def architecture_of(version: int) -> str:
    """``gfx90a`` of 90010: two decimal digits each for minor version and stepping, in hexadecimal in the name."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def _read_gpu(node: Path) -> Gpu | None:
    """None for a processor's node, and for a GPU that a container's rules keep from this process."""
    try:
        properties = _read_properties(node / "properties")
        banks = [_read_properties(bank / "properties") for bank in sorted((node / "mem_banks").iterdir())]
    except OSError:
        return None
    simd_count, version = properties.get("simd_count", 0), properties.get("gfx_target_version", 0)
    if not simd_count or not version:
        return None
    unique_id = properties.get("unique_id", 0)
    return Gpu(
        uuid=f"GPU-{unique_id:016x}" if unique_id else "",
        architecture=architecture_of(version),
        num_compute_units=simd_count // max(1, properties.get("simd_per_cu", 1)),
        wavefront_size=properties.get("wave_front_size", 0),
        total_memory_bytes=sum(
            bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _DEVICE_MEMORY_HEAPS
        ),
    )


def _read_properties(file: Path) -> dict[str, int]:
    """``name value`` lines; what is no number is left out."""
    pairs = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
