"""The reference platform's hooks. It is found without an entry point and is otherwise a plugin like any other.

Its linear kernel and attention backend are offered for every device that torch can address, with the lowest
priority, so that a new platform runs before it has any of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inferplane.api import API_VERSION, DeviceDescriptor, Platform, PluginManifest, Supported, hookimpl
from inferplane.api.host_memory import host_memory

if TYPE_CHECKING:
    from inferplane.api.attention import AttentionBackend
    from inferplane.api.linear import LinearKernel

MANIFEST = PluginManifest(name="reference", api=API_VERSION, provides=("platform",))


@hookimpl
def probe_devices() -> Supported:
    name = "plain torch on the host"
    device = DeviceDescriptor("reference", index=0, name=name, total_memory_bytes=host_memory().total_bytes)
    return Supported("reference", score=0, devices=(device,))


@hookimpl
def create_platform() -> Platform:
    from inferplane.reference.platform import ReferencePlatform

    return ReferencePlatform()


@hookimpl
def attention_backends() -> Sequence[type[AttentionBackend]]:
    from inferplane.reference.attention import ReferenceAttention

    return [ReferenceAttention]


@hookimpl
def linear_kernels() -> Sequence[type[LinearKernel]]:
    from inferplane.reference.linear import ReferenceLinear

    return [ReferenceLinear]
