"""The runtime of a device, as its platform makes it."""

from __future__ import annotations

from typing import Any

from inferplane.api.device import DeviceDescriptor, DeviceRuntime
from inferplane.api.platform import Platform


def make_runtime(platform: Platform, device: DeviceDescriptor) -> DeviceRuntime:
    """Raises `TypeError` for anything else that the platform returns: a forgotten ``return``, mostly."""
    runtime: Any = platform.device_runtime(device)
    if not isinstance(runtime, DeviceRuntime):
        raise TypeError(
            f"device_runtime of platform {device.platform!r} returned {runtime!r}, "
            "not an inferplane.api.DeviceRuntime"
        )
    return runtime
