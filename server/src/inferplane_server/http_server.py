"""`HttpServer`: the application on a socket, with an end that keeps its promises."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from inferplane.api.engine import Engine
from inferplane_server.app import create_app
from inferplane_server.contributed import contributed_routers
from inferplane_server.http_protocol import BoundedHttpProtocol
from inferplane_server.request_ids import RequestIds
from inferplane_server.service import Service
from inferplane_server.settings import ServerSettings

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than the pools of common clients keep a connection, so that it is they who close it."""
CLOSE_S = 5
"""For responses that are still on their way when the server stops."""
START_POLL_S = 0.005


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are not uvicorn's here: it would close connections first and finish requests after."""
        yield


class HttpServer:
    def __init__(self, engine: Engine, settings: ServerSettings, listener: socket.socket) -> None:
        app = create_app(engine, settings, contributed_routers(engine))
        self._service: Service = app.state.service
        self._settings = settings
        self._listener = listener
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                RequestIds(app),
                lifespan="off",
                http=BoundedHttpProtocol,
                log_config=None,
                access_log=settings.access_log,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self._serving: asyncio.Task[None] | None = None
        if settings.access_log:
            logging.getLogger("uvicorn.access").addFilter(_is_no_probe)

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Returns when connections are accepted."""
        self._serving = asyncio.create_task(self._uvicorn.serve([self._listener]))
        while not self._uvicorn.started and not self._serving.done():
            await asyncio.sleep(START_POLL_S)
        if self._serving.done():
            self._serving.result()

    def engine_fault(self) -> Exception | None:
        return self._service.lifecycle.engine_fault()

    async def prepare_chat(self) -> None:
        """Once the engine is ready: compiles the chat template, or warns that there is none."""
        chat_prompts = self._service.chat_prompts
        await asyncio.to_thread(chat_prompts.warm_up)
        if chat_prompts.source is None:
            logger.warning(
                "The model has no chat template, so /v1/chat/completions is refused; --chat-template supplies one"
            )

    async def drain(self) -> None:
        """Refuses new requests and waits for those in flight, as long as the settings allow."""
        lifecycle, timeout_s = self._service.lifecycle, self._settings.drain_timeout_s
        lifecycle.begin_drain()
        if lifecycle.num_in_flight:
            logger.info(
                "Finishing %d requests, for at most %g s; a second signal ends at once",
                lifecycle.num_in_flight,
                timeout_s,
            )
        if not await lifecycle.wait_idle(timeout_s):
            logger.warning("Breaking off %d requests that did not finish in time", lifecycle.num_in_flight)

    async def stop(self) -> None:
        """Closes the port and the connections."""
        self._service.lifecycle.begin_drain()
        if self._serving is not None:
            self._uvicorn.should_exit = True
            await self._serving


def _is_no_probe(record: logging.LogRecord) -> bool:
    """Probes come every second or so, and their lines would drown the others."""
    path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else None
    return path not in ("/health", "/metrics")
