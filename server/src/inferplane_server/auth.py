"""API keys. Every path needs one unless it is named here: a route added later is guarded without a thought."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from inferplane_server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Probes and scrapers carry no keys. Neither answers with anything that a request contained."""


class ApiKeyMiddleware:
    """Lets a request through when it carries ``Authorization: Bearer KEY`` with one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._is_authorized(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "an API key is required"})
        else:
            await _refusal(scope).response()(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        scheme, _, token = _authorization(scope).partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        offered = _digest(token.strip())
        # digests have one length, and every key is compared, so that the time tells nothing of a key
        matches = [hmac.compare_digest(offered, digest) for digest in self._digests]
        return any(matches)


def _authorization(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return value
    return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(scope: Scope) -> ApiError:
    if _authorization(scope):
        message = "The API key is not valid for this server."
    else:
        message = "An API key is required: send the header 'Authorization: Bearer KEY'."
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
