"""The GPUs that the kernel drivers show in sysfs: no torch, and no device is initialised."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
DEV = Path("/dev")
LOADER = "libze_loader.so.1"
_VENDOR = 0x8086
_MEMORY_FILES = (
    "tile*/physical_vram_size_bytes",
    "tile*/memory/physical_vram_size_bytes",
    "lmem_total_bytes",
)
"""Where the two drivers, in their versions, tell the size of a card's own memory; tiles add up."""


class DriverError(RuntimeError):
    """Something that the runtime needs is missing; the message says what, in words for people."""


@dataclass(frozen=True)
class Card:
    """One GPU as its driver describes it."""

    address: str
    """On the PCI bus."""
    device_id: int
    driver: str
    """``xe`` or ``i915``."""
    own_memory_bytes: int
    """0 where the driver does not tell, or the memory is the host's."""


def read_cards(sysfs: Path = SYSFS, dev: Path = DEV) -> list[Card]:
    """The vendor's GPUs in the order of their addresses. Raises `DriverError` when none may be used."""
    nodes = [
        node for node in (sysfs / "class/drm").glob("renderD*") if _number(node / "device/vendor") == _VENDOR
    ]
    if not nodes:
        raise DriverError("no Intel GPU with a driver (xe or i915) on this machine")
    open_to_us = [node for node in nodes if os.access(dev / "dri" / node.name, os.R_OK | os.W_OK)]
    if not open_to_us:
        wanted = ", ".join(f"/dev/dri/{node.name}" for node in nodes)
        raise DriverError(
            f"no access to {wanted}; add the user to the group that owns it (render), or start the container with it"
        )
    return sorted((_read_card(node / "device") for node in open_to_us), key=lambda card: card.address)


def require_loader(name: str = LOADER) -> None:
    """Raises `DriverError` unless the library is there through which every runtime finds the GPUs."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        raise DriverError(
            f"the Level Zero loader ({name}) was not found; install the distribution's libze1 and libze-intel-gpu1"
        ) from error


def _read_card(device: Path) -> Card:
    real = device.resolve()
    return Card(
        address=real.name,
        device_id=_number(device / "device"),
        driver=(device / "driver").resolve().name,
        own_memory_bytes=next(filter(None, (_sum_of(device, pattern) for pattern in _MEMORY_FILES)), 0),
    )


def _sum_of(device: Path, pattern: str) -> int:
    return sum(_number(file) for file in device.glob(pattern))


def _number(file: Path) -> int:
    """Of a file with one number, decimal or with 0x; 0 where there is none."""
    try:
        return int(file.read_text(encoding="utf-8").strip(), 0)
    except (OSError, ValueError):
        return 0
