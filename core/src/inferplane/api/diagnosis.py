"""What a check found, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but worse than it could."""
    FAULT = "fault"
    """It does not work."""


@dataclass(frozen=True)
class Diagnostic:
    """One line of ``inferplane plugins doctor``."""

    check: str
    """What was looked at, in two or three words: ``driver version``."""
    health: Health
    found: str
    """What was found, in words or figures."""
    mend: str | None = None
    """What to do about it; a command where one does it."""
