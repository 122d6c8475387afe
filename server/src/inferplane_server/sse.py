"""Server-sent events. A chunk is put together from parts encoded once a request, since there is one for each token."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferplane.engine.errors import EngineDeadError
from inferplane_server.errors import ApiError, as_api_error

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
encode_json = msgspec.json.Encoder().encode


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


class EventStream(Response):
    """Sends what ``events`` yields: bytes of one or more whole events, ready as they are.

    What ``events`` raises before its first yield is raised to the caller, who can still answer with a status. What
    it raises later is sent as an event with an error, and ends the stream without ``[DONE]``: a client must not take
    half an answer for a whole one.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            try:
                async for chunk in events:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except Exception as error:
                if not isinstance(
                    error, ApiError | EngineDeadError
                ):  # whose cause is logged once, not by each stream
                    logger.error("%s broke off in mid-stream", scope.get("path"), exc_info=error)
                await send(
                    {
                        "type": "http.response.body",
                        "body": event(as_api_error(error).body()),
                        "more_body": True,
                    }
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})
