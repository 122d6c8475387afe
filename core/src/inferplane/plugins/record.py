"""What is known of one plugin: the row that ``inferplane plugins list`` prints."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import StrEnum

from inferplane.api.manifest import PREVIOUS_API_VERSION


class PluginError(RuntimeError):
    """A plugin that was asked for cannot be used, or no choice between plugins can be made. Says the mend."""


class PluginStatus(StrEnum):
    LOADED = "loaded"
    """Its hooks are registered. A platform stays so until it has been probed."""
    AVAILABLE = "available"
    """A platform whose devices are here."""
    UNAVAILABLE = "unavailable"
    """A platform that works, but not on this machine."""
    REFUSED = "refused"
    """Written for another API version, or breaks the plugin contract. None of its hooks is registered."""
    FAILED = "failed"
    """Raised, hung or answered nonsense."""


UNUSABLE = (PluginStatus.REFUSED, PluginStatus.FAILED)


@dataclass(frozen=True, kw_only=True)
class PluginRecord:
    name: str
    distribution: str
    version: str
    api: str | None = None
    """The API version that the plugin declares, as ``major.minor``; None where it could not be read."""
    provides: tuple[str, ...] = ()
    status: PluginStatus = PluginStatus.LOADED
    score: int | None = None
    """Of a platform that was probed and found devices."""
    reason: str | None = None
    """Why the plugin is not usable, or which devices it found."""
    notes: tuple[str, ...] = ()
    """What the plugin's author should know although it works: hooks that will go, an API that is served by adapter."""
    traceback: str | None = None
    """Of the exception that took the plugin down."""

    @property
    def label(self) -> str:
        return f"plugin {self.name!r} ({self.distribution} {self.version})"

    @property
    def status_text(self) -> str:
        """For the middle of a sentence."""
        past = {PluginStatus.FAILED: "failed", PluginStatus.REFUSED: "was refused"}
        return past.get(self.status, f"is {self.status}")

    @property
    def is_adapted(self) -> bool:
        """Whether it was written for the previous major of the plugin API."""
        return self.api is not None and self.api.startswith(f"{PREVIOUS_API_VERSION[0]}.")

    @property
    def is_usable(self) -> bool:
        return self.status not in UNUSABLE


def describe(error: BaseException) -> str:
    """``ImportError: no module named …`` on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def format_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
