"""`DeltaStream`: events of one request on their way from the engine's reader to one consumer."""

from __future__ import annotations

import asyncio

from inferplane.engine.output import RequestDelta, merge_deltas


class DeltaStream:
    """A slow consumer gets the events that have piled up as one."""

    def __init__(self) -> None:
        self._pending: list[RequestDelta] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: RequestDelta) -> None:
        self._pending.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """The last event. What came before is still delivered."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> RequestDelta:
        """Waits for something new. Raises what `fail` was given."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta = merge_deltas(self._pending)
        self._pending = []
        return delta
