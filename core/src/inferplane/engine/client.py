"""How a front end reaches an engine core: in this process, or in one of its own."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq
import zmq.asyncio

from inferplane.engine import messages
from inferplane.engine.spawn import EngineChild
from inferplane.request import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from inferplane.config import EngineConfig
    from inferplane.engine.stats import EngineStats
    from inferplane.plugins import PluginSet


class InProcessClient:
    """The core in this process and thread; the caller drives it with `step`."""

    def __init__(self, config: EngineConfig, plugins: PluginSet) -> None:
        from inferplane.engine.core import EngineCore

        self.core = EngineCore(config, plugins)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """All of them or, if one is refused, none. Raises what `EngineCore.add_request` raises."""
        added: list[str] = []
        try:
            for request in requests:
                self.core.add_request(request)
                added.append(request.request_id)
        except Exception:
            self.core.abort(added)
            raise

    def abort(self, request_ids: Sequence[str]) -> None:
        self.core.abort(request_ids)

    def step(self) -> list[EngineOutput]:
        return self.core.step()

    def stats(self) -> EngineStats:
        return self.core.stats()

    def shutdown(self) -> None:
        self.core.shutdown()


class SubprocessClient:
    """The core in a child process. First `configure`, then `receive` until the engine is ready.

    Sending never blocks: messages queue until the child reads them.
    """

    def __init__(self, child: EngineChild) -> None:
        if len(child.inbox) > zmq.IPC_PATH_MAX_LEN:
            raise RuntimeError(f"{child.folder} is too long a name for a socket; set TMPDIR to a shorter one")
        self.child = child
        self._context = zmq.Context(io_threads=1)
        self._to_engine = self._context.socket(zmq.PUSH)
        self._to_engine.set_hwm(0)
        self._to_engine.reconnect_ivl = 5  # milliseconds, while the child starts
        self._to_engine.connect(child.inbox)
        self._from_engine = zmq.asyncio.Socket(self._context, zmq.PULL)
        self._from_engine.set_hwm(0)
        self._from_engine.bind(child.outbox)

    def configure(self, config: EngineConfig, *, heartbeat_s: float) -> None:
        level = logging.getLogger("inferplane").getEffectiveLevel()
        self._send(messages.Configure(config, heartbeat_s, level))

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._send(messages.Add(list(requests)))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._send(messages.Abort(list(request_ids)))

    def request_end(self) -> None:
        """Asks the child to end; `EngineChild.wait_for_end` waits for it."""
        self._send(messages.Shutdown())

    def _send(self, message: messages.ToEngine) -> None:
        if not self._to_engine.closed:
            self._to_engine.send(messages.encode(message), zmq.NOBLOCK)

    async def receive(self) -> messages.FromEngine:
        """The next message. Waits for ever if the child is gone: watch its process beside it."""
        return messages.decode_from_engine(await self._from_engine.recv())

    def shutdown(self) -> None:
        self.request_end()
        self.child.wait_for_end()
        self.close()

    def close(self) -> None:
        """Lets go of the sockets, once the child has ended. Call it in the thread (and task loop) that receives."""
        self._to_engine.close(linger=0)
        self._from_engine.close(linger=0)
        self._context.term()
        self.child.clean_up()


def describe_exit(returncode: int) -> str:
    """For people: how a process ended."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (out of memory, perhaps)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
