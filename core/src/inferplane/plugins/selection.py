"""Choosing a device: what the user asked for, else the best platform that is here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inferplane.api.device import DeviceDescriptor, Supported
from inferplane.plugins.record import PluginError, PluginRecord, PluginStatus

DEVICE_VARIABLE = "INFERPLANE_DEVICE"


def parse_device(requested: str) -> tuple[str, int | None]:
    """``NAME`` or ``NAME:INDEX``. Raises `PluginError` for anything else."""
    name, colon, index = requested.strip().partition(":")
    if not name or (colon and not (index.isascii() and index.isdigit())):
        raise PluginError(
            f"device {requested!r} is not understood: write NAME or NAME:INDEX, as in cpu or cpu:0"
        )
    return name, int(index) if colon else None


def pick_device(answer: Supported, index: int | None) -> DeviceDescriptor:
    """The device of that index, or the platform's first."""
    if index is None:
        return answer.devices[0]
    for device in answer.devices:
        if device.index == index:
            return device
    there = ", ".join(f"{device.platform}:{device.index} ({device.name})" for device in answer.devices)
    raise PluginError(f"platform {answer.platform!r} has no device {index}; it has {there}")


def pick_best(supported: Sequence[Supported]) -> Supported:
    """The answer with the highest score. Raises `PluginError` when two share it."""
    best = max(answer.score for answer in supported)
    winners = sorted(answer.platform for answer in supported if answer.score == best)
    if len(winners) > 1:
        names = " and ".join(repr(name) for name in winners)
        raise PluginError(
            f"platforms {names} are both available with score {best}, so neither is the default. "
            f"Choose one with --device {winners[0]} or {DEVICE_VARIABLE}={winners[0]}"
        )
    return next(answer for answer in supported if answer.score == best)


def unknown_device(name: str, source: str, records: Sequence[PluginRecord]) -> PluginError:
    """Nobody goes by that name: lists who is there and in what state."""
    return PluginError(
        f"{source} asks for platform {name!r}, which is not installed. Platforms:\n{listing(_platforms(records))}"
    )


def no_device(records: Sequence[PluginRecord]) -> PluginError:
    return PluginError(
        f"no platform is available on this machine. Platforms:\n{listing(_platforms(records))}"
    )


def unusable_device(record: PluginRecord, source: str, *, with_traceback: bool) -> PluginError:
    """The platform is installed and cannot serve: its cause, whole where no warning has shown it."""
    trace = f"\n{record.traceback}" if record.traceback and with_traceback else ""
    return PluginError(
        f"{source} asks for {record.label}, which {record.status_text}: {record.reason}{trace}"
    )


def _platforms(records: Sequence[PluginRecord]) -> list[PluginRecord]:
    """Of plugins that were probed: what has no device is still ``loaded``, and what failed may have been one."""
    return [record for record in records if record.status is not PluginStatus.LOADED]


def listing(records: Sequence[PluginRecord]) -> str:
    return "\n".join(
        f"  {record.name} ({record.distribution} {record.version}): {record.status}"
        + (f", {record.reason}" if record.reason else "")
        for record in records
    )


def found_text(answer: Supported) -> str:
    """The devices of a platform in a few words, for `PluginRecord.reason`."""
    counts: Mapping[str, int] = {
        device.name: sum(other.name == device.name for other in answer.devices) for device in answer.devices
    }
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())
