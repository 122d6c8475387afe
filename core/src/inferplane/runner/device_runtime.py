"""The runtime of a device and what it says, checked where the core takes it from a plugin."""

from __future__ import annotations

from typing import Any

from inferplane.api.device import DeviceDescriptor, DeviceRuntime, MemoryInfo
from inferplane.api.platform import Platform
from inferplane.plugins.record import PluginError


def make_runtime(platform: Platform, device: DeviceDescriptor) -> DeviceRuntime:
    """Raises `PluginError` for anything else that the platform returns: a forgotten ``return``, mostly."""
    runtime: Any = platform.device_runtime(device)
    if not isinstance(runtime, DeviceRuntime):
        raise PluginError(
            f"device_runtime of platform {device.platform!r} returned {runtime!r}, "
            "not an inferplane.api.DeviceRuntime"
        )
    return runtime


def device_memory(runtime: DeviceRuntime, device: DeviceDescriptor) -> MemoryInfo:
    """Raises `PluginError` for what is no `MemoryInfo` of two whole numbers."""
    memory: Any = runtime.memory()
    if not isinstance(memory, MemoryInfo):
        raise PluginError(
            f"memory of the runtime of platform {device.platform!r} returned {memory!r}, "
            "not an inferplane.api.MemoryInfo"
        )
    for name in ("total_bytes", "available_bytes"):
        if type(value := getattr(memory, name)) is not int or value < 0:
            raise PluginError(
                f"memory of the runtime of platform {device.platform!r} says that {name} is {value!r}, "
                "not a whole number of bytes"
            )
    return memory
