"""The plugin's hooks. Imported at every start of InferPlane, so everything heavy is imported inside a hook."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inferplane.api import (
    CapabilitySet,
    DeviceDescriptor,
    Platform,
    PluginManifest,
    Supported,
    Unsupported,
    hookimpl,
)

if TYPE_CHECKING:
    from inferplane.api.attention import AttentionBackend
    from inferplane.api.ops import OpImpl

MANIFEST = PluginManifest(name="kestrel", api=(2, 0), provides=("platform",))
MEMORY_BYTES = 4 << 30
DEFAULT_NUM_CARDS = 2


@hookimpl
def probe_devices() -> Supported | Unsupported:
    num_cards = int(os.environ.get("KESTREL_NUM_CARDS", DEFAULT_NUM_CARDS))
    if num_cards < 1:
        return Unsupported(
            "kestrel", f"KESTREL_NUM_CARDS is {num_cards}; set it to the number of cards to simulate"
        )
    cards = tuple(
        DeviceDescriptor(
            "kestrel", index, "simulated Kestrel card", MEMORY_BYTES, CapabilitySet(["bf16_matmul"])
        )
        for index in range(num_cards)
    )
    # Below a plain CPU: simulated cards are no reason to leave it, and have to be asked for with --device.
    return Supported("kestrel", score=5, devices=cards)


@hookimpl
def create_platform(device: DeviceDescriptor) -> Platform | None:
    if device.platform != "kestrel":
        return None
    from inferplane_kestrel.platform import KestrelPlatform

    return KestrelPlatform()


@hookimpl
def attention_backends(device: DeviceDescriptor) -> Sequence[type[AttentionBackend]]:
    if device.platform != "kestrel":
        return []
    from inferplane_kestrel.attention import KestrelAttention

    return [KestrelAttention]


@hookimpl
def op_implementations(device: DeviceDescriptor) -> Sequence[OpImpl]:
    if device.platform != "kestrel":
        return []
    from inferplane_kestrel.ops import OP_IMPLEMENTATIONS

    return OP_IMPLEMENTATIONS
