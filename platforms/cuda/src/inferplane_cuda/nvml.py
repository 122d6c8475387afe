"""The GPUs that the driver knows, read through its management library: no torch, and no device is initialised."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

LIBRARY_NAMES = (
    "libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",  # where containers mount a driver outside the linker's path
    "/usr/local/nvidia/lib/libnvidia-ml.so.1",
    "/usr/lib/wsl/lib/libnvidia-ml.so.1",
)
_TEXT_BYTES = 96


class DriverError(RuntimeError):
    """The driver is missing or does not answer; the message says which, in words for people."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it."""

    uuid: str
    name: str
    total_memory_bytes: int
    compute_capability: tuple[int, int]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def read_gpus(library_names: tuple[str, ...] = LIBRARY_NAMES) -> list[Gpu]:
    """Every GPU of the machine in bus order. Raises `DriverError` when the driver cannot be asked."""
    library = _load(library_names)
    _check(library, library.nvmlInit_v2(), "could not be initialised")
    try:
        count = ctypes.c_uint()
        _check(library, library.nvmlDeviceGetCount_v2(ctypes.byref(count)), "does not count its devices")
        return [_read_gpu(library, index) for index in range(count.value)]
    finally:
        library.nvmlShutdown()


def driver_version(library_names: tuple[str, ...] = LIBRARY_NAMES) -> str:
    """As the driver calls itself. Raises `DriverError`."""
    library = _load(library_names)
    _check(library, library.nvmlInit_v2(), "could not be initialised")
    try:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        _check(library, library.nvmlSystemGetDriverVersion(text, _TEXT_BYTES), "does not tell its version")
        return text.value.decode(errors="replace")
    finally:
        library.nvmlShutdown()


def _read_gpu(library: ctypes.CDLL, index: int) -> Gpu:
    device = ctypes.c_void_p()
    what = f"does not describe GPU {index}"
    _check(library, library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)), what)
    name, uuid = (ctypes.create_string_buffer(_TEXT_BYTES) for _ in range(2))
    _check(library, library.nvmlDeviceGetName(device, name, _TEXT_BYTES), what)
    _check(library, library.nvmlDeviceGetUUID(device, uuid, _TEXT_BYTES), what)
    memory, major, minor = _Memory(), ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)), what)
    status = library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    _check(library, status, what)
    return Gpu(
        uuid=uuid.value.decode(errors="replace"),
        name=name.value.decode(errors="replace"),
        total_memory_bytes=memory.total,
        compute_capability=(major.value, minor.value),
    )


def _load(names: tuple[str, ...]) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DriverError(f"no NVIDIA driver on this machine ({names[0]} was not found)")


def _check(library: ctypes.CDLL, status: int, what: str) -> None:
    if status != 0:
        library.nvmlErrorString.restype = ctypes.c_char_p
        text = library.nvmlErrorString(status) or b"no text"
        raise DriverError(f"the NVIDIA driver {what}: {text.decode(errors='replace')} (status {status})")
