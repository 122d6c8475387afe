"""The plugin's hooks. Imported at every start of InferPlane, so everything heavy is imported inside a hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inferplane.api import Platform, PluginManifest, Supported, Unsupported, hookimpl
from inferplane_kestrel.probing import NUM_CARDS_VARIABLE, find_devices

if TYPE_CHECKING:
    from inferplane.api.attention import AttentionBackend
    from inferplane.api.ops import OpImpl

MANIFEST = PluginManifest(name="kestrel", api=(2, 0), provides=("platform",))


@hookimpl
def probe_devices() -> Supported | Unsupported:
    devices = find_devices()
    if not devices:
        return Unsupported("kestrel", f"{NUM_CARDS_VARIABLE} is 0: set it to the number of cards to simulate")
    # Below a plain CPU: simulated cards are no reason to leave it, and have to be asked for with --device.
    return Supported("kestrel", score=5, devices=devices)


@hookimpl
def create_platform() -> Platform:
    from inferplane_kestrel.platform import KestrelPlatform

    return KestrelPlatform()


@hookimpl
def attention_backends() -> Sequence[type[AttentionBackend]]:
    from inferplane_kestrel.attention import KestrelAttention

    return [KestrelAttention]


@hookimpl
def op_implementations() -> Sequence[OpImpl]:
    from inferplane_kestrel.ops import OP_IMPLEMENTATIONS

    return OP_IMPLEMENTATIONS
