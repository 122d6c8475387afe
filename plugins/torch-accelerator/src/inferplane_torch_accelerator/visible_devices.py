"""Lists of devices that an environment variable leaves to a process, such as ``2,0``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Found = TypeVar("Found")


def visible(
    devices: Sequence[Found], setting: str | None, uuid_of: Callable[[Found], str] | None = None
) -> list[Found]:
    """What is left of ``devices`` under a value of the variable, in the order in which its runtime will count them.

    As runtimes do it, entries are numbers, or beginnings of UUIDs where ``uuid_of`` is given, and the first that names
    no device, or one that was named before, ends the list. Without a setting all are left.
    """
    if setting is None:
        return list(devices)
    chosen: list[Found] = []
    for entry in map(str.strip, setting.split(",")):
        device = _named(devices, entry, uuid_of)
        if device is None or device in chosen:
            break
        chosen.append(device)
    return chosen


def _named(devices: Sequence[Found], entry: str, uuid_of: Callable[[Found], str] | None) -> Found | None:
    if entry.isdigit():
        return devices[int(entry)] if int(entry) < len(devices) else None
    if uuid_of is None or not entry:
        return None
    matches = [device for device in devices if uuid_of(device).startswith(entry)]
    return matches[0] if len(matches) == 1 else None
