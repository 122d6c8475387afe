"""``X-Request-Id``: a name for each request by which its caller, proxies and logs speak of the same one."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
_TAKEN = re.compile(r"[!-~]{1,128}")
"""Visible characters, and no more of them than a log line can bear."""


class RequestIds:
    """Answers with the caller's id, or with a new one when it sent none or one that could not be written down.

    Around the whole application, its handling of errors included.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _TAKEN.fullmatch(given) else f"req-{uuid.uuid4().hex}"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app({**scope, "request_id": request_id}, receive, send_with_id)
