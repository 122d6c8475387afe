"""The engine process: ``python -m inferplane.engine.process INBOX OUTBOX``, started by `EngineChild`.

Two sockets join it to the front end, each bound by the side that reads. Standard input is a pipe that nobody writes
to: when it ends, the front end is gone, however it went, and this process ends too.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import zmq

from inferplane.engine import messages
from inferplane.engine.messages import (
    Abort,
    Add,
    Configure,
    Fatal,
    Heartbeat,
    Progress,
    Ready,
    Rejection,
    Shutdown,
)
from inferplane.engine.stats import EngineStats
from inferplane.request import EngineOutput, EngineRequest
from inferplane.scheduler.errors import QueueFullError, RequestTooLargeError

if TYPE_CHECKING:
    from inferplane.engine.core import EngineCore

logger = logging.getLogger(__name__)

IDLE_CHECK_MS = 1000
"""An idle engine looks after its workers this often; a request wakes it at once."""
PARENT_CHECK_S = 0.5
ORPHAN_GRACE_S = 1.0
"""Time for an orderly end once the front end is gone."""
LINGER_MS = 1000


class EngineLoop:
    """Takes messages, steps the core, sends what came of it."""

    def __init__(self, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._core: EngineCore | None = None
        self._outputs: list[EngineOutput] = []
        self._rejections: list[Rejection] = []
        self._reported: EngineStats | None = None
        self._ends = False
        self._ends_when_idle = False
        self.is_orphan = False
        """Set when the front end is gone: nobody waits for anything any more."""
        self.has_ended = threading.Event()
        self.step_started_at: float | None = None
        """Monotonic; None between steps."""

    def on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """What is in flight is finished first: a supervisor may signal all processes at once, and the front end
        decides how long its clients are served. While the model loads, and the second time, it ends at once."""
        if self._core is None or self._ends_when_idle or self.is_orphan:
            raise SystemExit(0)
        self._ends_when_idle = True

    def receive_config(self) -> Configure:
        message = messages.decode_to_engine(self._inbox.recv())
        if isinstance(message, Shutdown):
            raise SystemExit(0)
        if not isinstance(message, Configure):
            raise RuntimeError(f"the first message must be the configuration, got {type(message).__name__}")
        return message

    def serve(self, core: EngineCore, timings: dict[str, float]) -> None:
        """Until told to end. Raises what the core raises when nothing can be saved."""
        self._core = core
        self._reported = core.stats()
        self._send(Ready(core.config.model.max_model_len, self._reported, timings))
        # what is here by now stays: to look through it again and again would hold up a step by a tenth of a second each
        gc.collect()
        gc.freeze()
        while True:
            self._take_messages(core)
            if self._ends or (self._ends_when_idle and not core.has_work()):
                return
            if core.has_work():
                self.step_started_at = time.monotonic()
                self._outputs += core.step()
                self.step_started_at = None
            self._report(core)

    def _take_messages(self, core: EngineCore) -> None:
        """All that have come. Waits for one while there is nothing else to do."""
        if not core.has_work() and not self._inbox.poll(IDLE_CHECK_MS):
            core.check_health()
        while True:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            match messages.decode_to_engine(data):
                case Add(requests):
                    for request in requests:
                        self._add(core, request)
                case Abort(request_ids):
                    self._outputs += core.abort(request_ids)
                case Shutdown():
                    self._ends = True
                case other:
                    raise RuntimeError(f"unexpected message {type(other).__name__}")

    def _add(self, core: EngineCore, request: EngineRequest) -> None:
        try:
            core.add_request(request)
        except QueueFullError as error:
            self._rejections.append(Rejection(request.request_id, "queue_full", "", str(error)))
        except RequestTooLargeError as error:
            self._rejections.append(Rejection(request.request_id, "too_large", error.param, str(error)))
        except Exception as error:
            logger.exception("request %s was refused", request.request_id)
            self._rejections.append(Rejection(request.request_id, "invalid", "", str(error)))

    def _report(self, core: EngineCore) -> None:
        stats = core.stats()
        if not self._outputs and not self._rejections and stats == self._reported:
            return
        self._send(Progress(self._outputs, stats, self._rejections))
        self._outputs, self._rejections, self._reported = [], [], stats

    def _send(self, message: messages.FromEngine) -> None:
        self._outbox.send(messages.encode(message))

    def send_fatal(self, error: BaseException) -> None:
        from inferplane.config import ConfigError
        from inferplane.models.errors import ModelLoadError
        from inferplane.plugins import PluginError
        from inferplane.plugins.blame import what_failed

        if isinstance(error, ConfigError):
            message = Fatal("config", error.option, str(error))
        elif isinstance(error, ModelLoadError):
            message = Fatal("model", "", str(error))
        elif isinstance(error, PluginError):
            message = Fatal("plugin", "", str(error))
        else:
            logger.critical("the engine cannot go on", exc_info=error)
            message = Fatal("engine", "", what_failed(error))
        self._send(message)


def watch_parent(loop: EngineLoop, *addresses: str) -> None:
    """Waits for standard input to end. Some other child of the front end may hold its other end open, so it also
    looks who the parent is."""
    parent, stdin = os.getppid(), sys.stdin.fileno()
    while os.getppid() == parent:
        readable, _, _ = select.select([stdin], [], [], PARENT_CHECK_S)
        if readable and not os.read(stdin, 1024):
            break
    end_orphan(loop, addresses)


def end_orphan(loop: EngineLoop, addresses: Iterable[str]) -> None:
    """Ends this process once the front end is gone: first in order, then anyhow."""
    loop.is_orphan = True
    os.kill(os.getpid(), signal.SIGTERM)
    loop.has_ended.wait(ORPHAN_GRACE_S)
    remove_sockets(addresses)
    os._exit(1)


def remove_sockets(addresses: Iterable[str]) -> None:
    """The front end does this, unless it was killed."""
    for address in addresses:
        path = Path(address.removeprefix("ipc://"))
        path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()


def send_heartbeats(
    context: zmq.Context[zmq.Socket[bytes]], address: str, loop: EngineLoop, interval_s: float
) -> None:
    """On a socket of its own: sockets belong to one thread."""
    with context.socket(zmq.PUSH) as outbox:
        outbox.linger = 0
        outbox.connect(address)
        while not loop.has_ended.wait(interval_s):
            started = loop.step_started_at
            age = 0.0 if started is None else time.monotonic() - started
            with suppress(zmq.Again):  # a front end that does not read sees later ones
                outbox.send(messages.encode(Heartbeat(age)), zmq.NOBLOCK)


def import_model_code() -> None:
    """What takes seconds to import, while the front end still finds out what is to be loaded."""
    from inferplane.runner.worker import ModelWorker  # noqa: F401


def start_thread(name: str, target: Callable[..., None], args: tuple[object, ...]) -> None:
    threading.Thread(target=target, args=args, name=name, daemon=True).start()


def main(inbox_address: str, outbox_address: str) -> int:
    started = time.perf_counter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the front end decides
    context = zmq.Context(io_threads=1)
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.set_hwm(0)
    outbox.set_hwm(0)
    inbox.bind(inbox_address)
    outbox.connect(outbox_address)
    loop = EngineLoop(inbox, outbox)
    signal.signal(signal.SIGTERM, loop.on_sigterm)
    start_thread("parent-watch", watch_parent, (loop, inbox_address, outbox_address))
    core: EngineCore | None = None
    try:
        from inferplane.engine.core import EngineCore
        from inferplane.plugins import load_plugins

        import_model_code()
        import_s = time.perf_counter() - started
        configure = loop.receive_config()
        logging.getLogger().setLevel(configure.log_level)
        start_thread("heartbeat", send_heartbeats, (context, outbox_address, loop, configure.heartbeat_s))
        core = EngineCore(configure.config, load_plugins(quiet=True))
        loop.serve(core, {"imports": import_s, **core.timings})
        return 0
    except SystemExit:
        return 0
    except BaseException as error:
        loop.send_fatal(error)
        return 1
    finally:
        if core is not None:
            core.shutdown()
        loop.has_ended.set()
        inbox.close(linger=0)
        outbox.close(linger=LINGER_MS)
        context.term()
        if loop.is_orphan:
            remove_sockets((inbox_address, outbox_address))


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stderr)
    exit_code = main(*sys.argv[1:])
    logging.shutdown()
    # everything is closed; to take a large interpreter apart as well would cost a second
    os._exit(exit_code)
