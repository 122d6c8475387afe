"""`BoundedHttpProtocol`: HTTP/1.1 as uvicorn reads it, with bounds on a request that has only begun."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from inferplane_server.errors import ApiError

MAX_HEAD_BYTES = 64 * 2**10
"""Of the request line and the headers, after the first read from the socket."""
HEAD_S = 30.0
"""From the connection, or from the first byte of a later request on it, to the end of the headers."""


BODY_EXTENSION = "inferplane.chunked_body"
"""Name of an entry in the scope's ``extensions``, whose ``body`` is a `ChunkedBody`."""


class ChunkedBody:
    """Writes the body of a response that has begun, past the layers of the application, which would be passed for every
    token. The end of the response goes their way again."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """Whether the headers are sent, and promised chunks."""
        return self._cycle.response_started and bool(self._cycle.chunked_encoding)

    async def write(self, body: bytes) -> None:
        """Waits while the client reads too slowly; does nothing once it is gone. ``body`` is not empty."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class BoundedHttpProtocol(HttpToolsProtocol):
    """Breaks off heads that do not end.

    A head is kept in memory until it is whole, before a key or the limit on bodies is looked at, so that without bounds
    anyone who can connect could fill the memory. What is no HTTP gets the envelope that all other errors have.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        # the read in which it began may also hold the end of the request before
        if was_in_head and self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._break_off(
                    431, f"The headers are larger than this server takes: at most {MAX_HEAD_BYTES} bytes."
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = 0
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"] = {BODY_EXTENSION: {"body": ChunkedBody(self.cycle)}}

    def send_400_response(self, msg: str) -> None:
        self._break_off(400, "What was sent is no HTTP request that this server can read.")

    def shutdown(self) -> None:
        """The server ends: a request whose body is still to come would be refused, and is not waited for."""
        if self._is_answering and self.cycle.more_body and not self.cycle.response_started:
            self.transport.close()
        else:
            super().shutdown()

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(HEAD_S, self._on_slow_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_slow_head(self) -> None:
        self._head_timer = None
        if self._is_answering:  # the head is that of a next request, and this one's answer must not suffer
            self._start_head_timer()
        elif self._is_in_head:
            self._break_off(408, f"The headers were not complete after {HEAD_S:g} s.")
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _break_off(self, status: int, message: str) -> None:
        """Answers, unless that would end up in the middle of another answer, and closes the connection."""
        self._is_in_head = False
        self._stop_head_timer()
        if self.transport.is_closing():
            return
        if not self._is_answering:
            body = ApiError(status, message, code="invalid_http").body()
            self.transport.write(
                STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
        self.transport.close()
