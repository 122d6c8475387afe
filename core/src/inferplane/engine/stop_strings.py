"""`StopStrings`: finds the end of a text that arrives in pieces, and lets nothing of a stop string slip out before."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text.

    After each piece the longest tail that could still grow into a stop string is held back. Of the stop strings that a
    piece completes, the one that begins first ends the text; of two that begin together, the one named first.
    """

    __slots__ = ("_first_chars", "_held", "_includes_stop", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = stops
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._includes_stop = include_in_output
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    @property
    def is_watching(self) -> bool:
        """Whether there is any stop string; if not, `push` changes nothing."""
        return bool(self._stops)

    def push(self, piece: str, *, is_searched: bool = True) -> str:
        """The text that may be shown now. With ``is_searched`` false, a stop string that ends in this piece does
        not count (but one that begins in it may)."""
        if not self._held and self._first_chars.isdisjoint(piece):  # no stop string begins here
            return piece
        num_old = len(self._held)
        text = self._held + piece
        if is_searched and (end := self._find(text, num_old)) is not None:
            self._held = ""
            return text[:end]
        num_held = max(_length_of_started(stop, text) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What was held back, when the text ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_old: int) -> int | None:
        """Where to cut ``text``, whose first ``num_old`` characters have been searched before."""
        first = len(text)
        for stop in self._stops:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if 0 <= start < first:
                first, self.found = start, stop
        if self.found is None:
            return None
        return first + len(self.found) if self._includes_stop else first


def _length_of_started(stop: str, text: str) -> int:
    """Length of the longest tail of ``text`` that begins ``stop`` without completing it."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start != -1:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
