"""Server-sent events. A chunk is put together from parts encoded once a request, since there is one for each token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inferplane.engine.errors import EngineDeadError
from inferplane_server.errors import ApiError, as_api_error
from inferplane_server.http_protocol import BODY_EXTENSION, ChunkedBody

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
COMMENT = b": still here\n\n"
KEEP_ALIVE_S = 15.0
"""Common proxies close a connection that is silent for 30 or 60 s."""
encode_json = msgspec.json.Encoder().encode


def event(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


class EventStream(Response):
    """Sends what ``events`` yields: bytes of one or more whole events, ready as they are.

    What ``events`` raises before anything was sent is raised to the caller, who can still answer with a status. What
    it raises later is sent as an event with an error, and ends the stream without ``[DONE]``: a client must not take
    half an answer for a whole one.

    While nothing comes for long, as for a request that waits behind others, comments tell proxies and clients that the
    connection lives.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = _Wire(send, self.raw_headers, scope.get("extensions", {}).get(BODY_EXTENSION, {}).get("body"))
        keeping_alive = asyncio.create_task(wire.keep_alive())
        try:
            async with aclosing(self._events) as events:
                try:
                    async for chunk in events:
                        await wire.send(chunk)
                except Exception as error:
                    if not wire.has_started:
                        raise
                    # the engine's death is logged once, not by each stream
                    if not isinstance(error, ApiError | EngineDeadError):
                        logger.error("%s broke off in mid-stream", scope.get("path"), exc_info=error)
                    await wire.send(event(as_api_error(error).body()))
        finally:
            keeping_alive.cancel()
        await wire.send(b"", more=False)


class _Wire:
    """One response's way out. Its headers go with the first bytes."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], body: ChunkedBody | None) -> None:
        """``body`` is the server's short way for what is neither the first nor the last of the response."""
        self._send = send
        self._body = body
        self._headers = headers
        self._lock = asyncio.Lock()
        self._last_sent_s = time.monotonic()
        self.has_started = False

    async def send(self, body: bytes, *, more: bool = True) -> None:
        if more and self._body is not None and self._body.is_open:
            self._last_sent_s = time.monotonic()
            await self._body.write(body)
            return
        async with self._lock:  # two could begin at once
            if not self.has_started:
                self.has_started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            self._last_sent_s = time.monotonic()
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def keep_alive(self) -> None:
        while True:
            rest_s = self._last_sent_s + KEEP_ALIVE_S - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                await self.send(COMMENT)
