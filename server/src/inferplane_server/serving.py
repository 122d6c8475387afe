"""The life of ``inferplane serve``: bind, start the engine, serve, drain, end.

The engine's process starts first, and the web framework is imported while it loads. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from inferplane.config import EngineArgs
from inferplane.engine.errors import EngineEndedError
from inferplane_server.settings import ServerSettings

if TYPE_CHECKING:
    from inferplane.engine.async_engine import AsyncEngine
    from inferplane_server.http_server import HttpServer

logger = logging.getLogger(__name__)

BACKLOG = 2048
HEALTH_CHECK_S = 0.25
DEATH_NOTICE_S = 3.0
"""After the engine's death /health says 503 for this long, so that probes and callers learn why, and so that a
supervisor which tells one process after another to end gets to this one."""


class ServeError(RuntimeError):
    """The server cannot start or go on; the message is for the operator."""


def serve_until_stopped(engine_args: EngineArgs, settings: ServerSettings) -> int:
    """Serves until a signal or the engine's end. Returns the exit code: 0 after a drain, 1 when the engine died.

    Raises `ServeError` when the address cannot be had, before anything is loaded, and `ConfigError` or
    `ModelLoadError` when the model cannot.
    """
    started_s = time.monotonic()
    listener = bind(settings.host, settings.port)
    # until the event loop takes the signals: unwinding from wherever this thread is also stops the engine
    signal.signal(signal.SIGTERM, _exit_in_order)
    signal.signal(signal.SIGINT, _exit_in_order)
    engine = None
    try:
        from inferplane.engine.async_engine import AsyncEngine

        engine = AsyncEngine.launch(engine_args)
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            return runner.run(_serve(engine, settings, listener, started_s))
    finally:
        listener.close()
        if engine is not None:
            asyncio.run(engine.shutdown())


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Callers who come before the server is up wait in its backlog."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServeError(f"--host {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ServeError(
            f"cannot listen on {host}, port {port}: {error.strerror}. "
            "Choose another with --port; --port 0 takes any free one."
        ) from error
    listener.setblocking(False)
    return listener


def _exit_in_order(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop takes a third of the cost of a streamed token away; where it does not exist asyncio's own loop serves."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(
    engine: AsyncEngine, settings: ServerSettings, listener: socket.socket, started_s: float
) -> int:
    stopper = Stopper()
    stopper.listen()
    from inferplane_server.http_server import HttpServer

    http = HttpServer(engine, settings, listener)
    ending = asyncio.create_task(_watch_engine(engine, http, started_s))
    asked = asyncio.create_task(stopper.wait())
    try:
        await http.start()
        await asyncio.wait({ending, asked}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            return ending.result()
        await http.drain()
        return 0
    finally:
        ending.cancel()
        asked.cancel()
        # breaks off what is still in flight, each with an error that says so
        await engine.shutdown()
        await http.stop()


async def _watch_engine(engine: AsyncEngine, http: HttpServer, started_s: float) -> int:
    """Announces when the engine is ready. Returns the exit code when it has died."""
    await engine.wait_ready()
    logger.info("Ready after %.1f s: %s", time.monotonic() - started_s, http.url)
    await http.prepare_chat()
    gc.collect()
    gc.freeze()  # collections to come need not look through all that is here by now, while streams wait
    while (error := http.engine_fault()) is None:
        await asyncio.sleep(HEALTH_CHECK_S)
    level = logging.WARNING if isinstance(error, EngineEndedError) else logging.CRITICAL
    logger.log(level, "Ending in %.0f s, because the engine does not work: %s", DEATH_NOTICE_S, error)
    await asyncio.sleep(DEATH_NOTICE_S)
    return 1


class Stopper:
    """The first SIGTERM or SIGINT asks for an orderly end, the second one does not wait for it."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal, signum)

    def _on_signal(self, signum: int) -> None:
        if self._asked.is_set():
            os._exit(128 + signum)  # the engine's process ends with its parent
        self._asked.set()

    async def wait(self) -> None:
        await self._asked.wait()
