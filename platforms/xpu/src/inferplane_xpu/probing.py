"""Which GPUs this process may use, and what each can do. Imports no torch and initialises no device."""

from __future__ import annotations

import os
from dataclasses import dataclass

from inferplane.api import CapabilitySet, DeviceDescriptor, Supported, Unsupported
from inferplane.api.host_memory import host_memory
from inferplane_torch_accelerator.torch_build import why_not_built_for
from inferplane_torch_accelerator.visible_devices import visible
from inferplane_xpu.cards import Card, DriverError, read_cards, require_loader

PLATFORM = "xpu"
SCORE = 100
VISIBLE = "ZE_AFFINITY_MASK"
CAPABILITIES = ("fp16_matmul", "bf16_matmul", "int8_matmul")
"""Of every family with matrix engines. Graphs are not among them until somebody has recorded one."""


@dataclass(frozen=True)
class Family:
    """GPUs whose device ids lie between two."""

    first_id: int
    last_id: int
    name: str
    has_own_memory: bool = True


FAMILIES = (
    Family(0x0BD0, 0x0BDF, "Data Center GPU Max"),
    Family(0x5690, 0x56BF, "Arc A-Series"),
    Family(0x56C0, 0x56CF, "Data Center GPU Flex"),
    Family(0xE200, 0xE2FF, "Arc B-Series"),
    Family(0x6420, 0x642F, "Lunar Lake graphics", has_own_memory=False),
    Family(0x64A0, 0x64BF, "Lunar Lake graphics", has_own_memory=False),
    Family(0xB080, 0xB0BF, "Panther Lake graphics", has_own_memory=False),
)
"""Those with matrix engines."""


def probe() -> Supported | Unsupported:
    """The usable GPUs of this process, or why there are none."""
    try:
        cards = read_cards()
        require_loader()
    except DriverError as error:
        return Unsupported(PLATFORM, str(error))
    if reason := why_not_built_for("xpu", "XPU"):
        return Unsupported(PLATFORM, reason)
    known = [card for card in cards if family_of(card)]
    if not known:
        ids = ", ".join(f"{card.device_id:#06x}" for card in cards)
        return Unsupported(PLATFORM, f"no GPU here is of a family with matrix engines (device id {ids})")
    left = visible(preferred(known), _without_tiles(os.environ.get(VISIBLE)))
    if not left:
        return Unsupported(PLATFORM, f"{VISIBLE}={os.environ[VISIBLE]!r} leaves no GPU to this process")
    return Supported(PLATFORM, SCORE, tuple(describe(card, index) for index, card in enumerate(left)))


def family_of(card: Card) -> Family | None:
    return next((each for each in FAMILIES if each.first_id <= card.device_id <= each.last_id), None)


def preferred(cards: list[Card]) -> list[Card]:
    """Those that torch counts: cards with memory of their own, and the others only where there is none."""
    cards_apart = [card for card in cards if (family := family_of(card)) and family.has_own_memory]
    return cards_apart or cards


def describe(card: Card, index: int) -> DeviceDescriptor:
    """Memory is what the driver tells, and the host's where it tells nothing: the runtime knows it exactly."""
    family = family_of(card)
    name = f"Intel {family.name if family else 'GPU'} ({card.device_id:#06x}, driver {card.driver})"
    memory_bytes = card.own_memory_bytes or host_memory().total_bytes
    return DeviceDescriptor(PLATFORM, index, name, memory_bytes, CapabilitySet(CAPABILITIES))


def _without_tiles(setting: str | None) -> str | None:
    """``0,1`` of ``0.0,0.1,1.0``: the list may name the tiles of a card, each of which keeps the card."""
    if setting is None:
        return None
    cards = [entry.strip().partition(".")[0] for entry in setting.split(",")]
    return ",".join(dict.fromkeys(cards))
