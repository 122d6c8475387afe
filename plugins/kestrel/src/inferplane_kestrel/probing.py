"""Looking for cards. They are simulated, so there are as many as one says."""

from __future__ import annotations

import os

from inferplane.api import CapabilitySet, DeviceDescriptor

NUM_CARDS_VARIABLE = "KESTREL_NUM_CARDS"
MEMORY_BYTES = 4 << 30


def find_devices() -> tuple[DeviceDescriptor, ...]:
    num_cards = int(os.environ.get(NUM_CARDS_VARIABLE, "2"))
    capabilities = CapabilitySet(["bf16_matmul"])
    return tuple(
        DeviceDescriptor("kestrel", index, "simulated Kestrel card", MEMORY_BYTES, capabilities)
        for index in range(num_cards)
    )
