"""Whose code an unexpected error came from."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import TracebackType

from inferplane.plugins.discovery import ENTRY_POINT_GROUP
from inferplane.plugins.record import describe

CORE = "inferplane"


@dataclass(frozen=True)
class Blame:
    label: str
    """Of the plugin, with its distribution and version."""
    place: str
    """``function (file.py, line 7)``, the last one in the plugin's own code."""
    reason: str
    traceback: str
    """From where the plugin was entered; how the core came to call it helps nobody."""

    @property
    def message(self) -> str:
        return f"{self.label} failed in {self.place}: {self.reason}"


def blame(error: BaseException) -> Blame | None:
    """The plugin that raised ``error``, or called a library that did. None where the core did last, or nobody.

    An error that is raised in the core about what a plugin handed over is not traced to the plugin. Nor is one of a
    package that has no entry point, which plugins share, where the core calls it itself.
    """
    owners = {entry.module.partition(".")[0]: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    frames = [
        (frame, package)
        for frame in _frames(error.__traceback__)
        if (package := _package(frame)) == CORE or package in owners
    ]
    if not frames or (culprit := frames[-1][1]) == CORE:
        return None
    last, entered = frames[-1][0], next(frame for frame, package in frames if package == culprit)
    entry, code = owners[culprit], last.tb_frame.f_code
    distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown"
    file = code.co_filename.replace("\\", "/").rpartition("/")[2]
    return Blame(
        label=f"plugin {entry.name!r} ({distribution})",
        place=f"{code.co_name} ({file}, line {last.tb_lineno})",
        reason=describe(error),
        traceback="".join(traceback.format_exception(type(error), error, entered)).rstrip(),
    )


def what_failed(error: BaseException) -> str:
    """In one line; with the plugin at fault, where there is one."""
    fault = blame(error)
    return fault.message if fault else describe(error)


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _package(frame: TracebackType) -> str:
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
