"""Who won an op, a linear layer or an attention layer, and why the others did not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from inferplane.plugins.record import PluginError, describe


@dataclass(frozen=True)
class Candidate:
    name: str
    plugin: str
    """Who brought it."""
    priority: int
    reason: str | None
    """None when it can serve, else why not."""
    implementation: Any
    """What wins: a function or a class."""


@dataclass(frozen=True)
class Decision:
    """``candidates`` in order of preference, those that cannot serve included."""

    subject: str
    candidates: tuple[Candidate, ...]

    @property
    def winner(self) -> Candidate | None:
        """None when no candidate can serve."""
        return next((each for each in self.candidates if each.reason is None), None)

    @property
    def chosen(self) -> Candidate:
        """Raises `PluginError` with every candidate's reason when none can serve."""
        if (winner := self.winner) is not None:
            return winner
        reasons = "\n".join(f"  {each.name} ({each.plugin}): {each.reason}" for each in self.candidates)
        raise PluginError(f"nothing installed can serve {self.subject}:\n{reasons or '  (no candidates)'}")


def decide(subject: str, candidates: Sequence[Candidate], home: str) -> Decision:
    """Orders candidates: priority first, then those of the device's own platform, then by name."""
    ranked = sorted(
        candidates, key=lambda each: (-each.priority, each.plugin != home, each.plugin, each.name)
    )
    return Decision(subject, tuple(ranked))


def ask(unsupported_reason: Callable[..., str | None], *args: Any) -> str | None:
    """A provider's own answer; one that raises while it is asked cannot serve."""
    try:
        return unsupported_reason(*args)
    except Exception as error:
        return f"its check raised {describe(error)}"
