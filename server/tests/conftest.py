"""The application over an engine without a model, and a client that talks to it without a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from inferplane_server.app import create_app
from inferplane_server.settings import ServerSettings
from scripted_engine import ScriptedEngine


class Client(httpx.AsyncClient):
    """Speaks to an app; ``service`` is what its routes share."""

    def __init__(self, engine: ScriptedEngine, **settings: Any) -> None:
        app = create_app(engine, ServerSettings(**settings))
        self.engine = engine
        self.app = app
        self.service = app.state.service
        super().__init__(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://server",
            timeout=30,
        )

    async def chat(self, content: Any = "hello", **fields: Any) -> httpx.Response:
        body = {"model": "fake", "messages": [{"role": "user", "content": content}], **fields}
        return await self.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", json={"model": "fake", "prompt": prompt, **fields})


@pytest.fixture
def make_client() -> Callable[..., Client]:
    """``make_client(api_keys=("k",))``, or with ``engine=ScriptedEngine(...)``."""

    def make(engine: ScriptedEngine | None = None, **settings: Any) -> Client:
        return Client(engine or ScriptedEngine(), **settings)

    return make


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()
