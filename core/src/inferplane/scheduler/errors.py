"""Why a request is not taken."""

from __future__ import annotations


class RequestTooLargeError(ValueError):
    """A request that could never run to its end, however long it waited. ``param`` is the field that asks too much."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(RuntimeError):
    """As many requests wait as may. The same request can be taken later."""
