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
    chosen: list[int] = []
    for entry in map(str.strip, setting.split(",")):
        index = _place(devices, entry, uuid_of)
        if index is None or index in chosen:
            break
        chosen.append(index)
    return [devices[index] for index in chosen]


def _place(devices: Sequence[Found], entry: str, uuid_of: Callable[[Found], str] | None) -> int | None:
    if entry.isdigit():
        return int(entry) if int(entry) < len(devices) else None
    if uuid_of is None or not entry:
        return None
    matches = [index for index, device in enumerate(devices) if uuid_of(device).startswith(entry)]
    return matches[0] if len(matches) == 1 else None
