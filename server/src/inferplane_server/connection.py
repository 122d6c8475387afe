"""Work that ends when its caller hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferplane_server.lifecycle import Lifecycle


class BoundToCaller(Response):
    """Makes its response while watching the connection; a caller who leaves cancels the work, streaming or not.

    Errors raised by ``work`` before anything was sent become error responses as in any route.
    """

    def __init__(self, lifecycle: Lifecycle, work: Callable[[], Awaitable[Response]]) -> None:
        super().__init__()
        self._lifecycle = lifecycle
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer() -> None:
            response = await self._work()
            await response(scope, receive, send)

        with self._lifecycle.admit():
            answering = asyncio.create_task(answer())
            leaving = asyncio.create_task(_hang_up(receive))
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
            finally:
                for task in (leaving, answering):
                    task.cancel()
                for task in (leaving, answering):
                    # what it raised on its way out has nobody left to read it
                    with suppress(asyncio.CancelledError, Exception):
                        await task


async def _hang_up(receive: Receive) -> None:
    """Returns when the caller is gone. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
