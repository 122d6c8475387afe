"""`RankProcesses`: the processes of ranks 1 to N-1, the sockets to them, and the watch over them."""

from __future__ import annotations

import logging
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from enum import Enum

import zmq

from inferplane.executor.base import WorkerDiedError
from inferplane.executor.messages import (
    Answer,
    Command,
    Exit,
    StepFailed,
    commands_address,
    decode_report,
    encode,
    reports_address,
)

logger = logging.getLogger("inferplane.executor")

WATCH_INTERVAL_S = 0.2
DISAGREEMENT_S = 5.0
"""How long a rank may still compute a step that has raised on another before the ranks count as out of step."""
EXIT_S = 5.0
"""How long ranks have to end by themselves."""
RECONNECT_MS = 10
"""How often a rank's socket is tried while it starts."""
MAX_IPC_PATH_BYTES = 100
"""Paths of sockets are limited to 107 bytes by the operating system; this leaves room for the names in the folder."""


class StepState(Enum):
    """Of rank 0's newest step."""

    RUNNING = "running"
    DONE = "done"
    RAISED = "raised"


class RankProcesses:
    """A thread watches the processes and receives their reports. When one dies, or fails a step that others do not
    fail, it ends them all: only so does a rank that waits in a collective for another get an error and not wait on.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.directory = tempfile.mkdtemp(prefix="inferplane-")
        if len(self.directory.encode()) + len("/reports") > MAX_IPC_PATH_BYTES:
            shutil.rmtree(self.directory)
            raise ValueError(
                f"socket paths in {self.directory} are too long for the system; set TMPDIR to a shorter folder"
            )
        self._context = zmq.Context()
        self._commands = [self._connect(commands_address(self.directory, rank)) for rank in self._ranks]
        self._reports = self._context.socket(zmq.PULL)
        self._reports.bind(reports_address(self.directory))
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        """None wakes a reader when `failure` is set."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._step = (0, StepState.DONE)
        self._step_failures: dict[int, tuple[StepFailed, float]] = {}
        """By rank, with the time of its report."""
        self._num_calls = 0
        self._is_stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)

    @property
    def _ranks(self) -> range:
        return range(1, self._world_size)

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        # The side that connects may send at any time, before the other is up and after it is gone; the side that binds
        # would wait in send for a rank that has died.
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.reconnect_ivl = RECONNECT_MS
        socket.connect(address)
        return socket

    @property
    def init_method(self) -> str:
        return f"file://{self.directory}/rendezvous"

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self) -> None:
        for rank in self._ranks:
            command = [
                sys.executable,
                "-P",  # what lies in the current folder must not stand in for a module
                "-m",
                "inferplane.executor.rank",
                self.directory,
                str(rank),
                str(self._world_size),
            ]
            # Standard output belongs to whoever called us. A session of its own, so that an interrupt from the terminal
            # reaches only the parent, which then ends the ranks in order.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
            self._processes.append(process)
        self._watcher.start()

    # -- commands

    def send(self, command: Command) -> None:
        self.send_encoded(encode(command))

    def send_encoded(self, message: bytes) -> None:
        self.check()
        for socket in self._commands:
            socket.send(message)

    def next_call_id(self) -> int:
        self._num_calls += 1
        return self._num_calls

    def answers(self, call_id: int, timeout_s: float | None = None) -> list[Answer]:
        """Of every rank, in rank order; fewer when the time is over. Raises `WorkerDiedError`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        found: dict[int, Answer] = {}
        while len(found) < len(self._ranks):
            self.check()
            try:
                answer = self._answers.get(
                    timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
                )
            except queue.Empty:
                break
            if answer is not None and answer.call_id == call_id:
                found[answer.rank] = answer
        return [found[rank] for rank in sorted(found)]

    # -- health

    def check(self) -> None:
        """Raises `WorkerDiedError` once something is known to be wrong."""
        if self._failure is not None:
            raise WorkerDiedError(self._failure)
        if self._is_stopping.is_set():
            raise WorkerDiedError("the executor is shut down")

    def note_step(self, number: int, state: StepState) -> None:
        """Tells the watch where rank 0 is, so that it can tell a shared failure from a lone one."""
        with self._lock:
            self._step = (number, state)

    def forget_step_failures(self) -> None:
        """The ranks have agreed on the failed step."""
        with self._lock:
            self._step_failures.clear()

    def declare_broken(self, reason: str) -> None:
        """Ends all ranks. The first reason given is the one that everybody is told."""
        with self._lock:
            if self._failure is None and not self._is_stopping.is_set():
                self._failure = reason
                logger.error("%s", reason)
        for process in self._processes:
            process.kill()
        self._answers.put(None)

    def _watch(self) -> None:
        while not self._is_stopping.is_set():
            try:
                if self._reports.poll(int(WATCH_INTERVAL_S * 1000)):
                    self._take(decode_report(self._reports.recv()))
                reason = None if self._failure is not None else self._what_is_wrong()
            except Exception as error:  # a watch that ended in silence would be worse than none
                reason = f"the watch over the ranks failed: {type(error).__name__}: {error}"
            if reason is not None:
                self.declare_broken(reason)
        self._reports.close(linger=0)

    def _take(self, report: Answer | StepFailed) -> None:
        if isinstance(report, Answer):
            self._answers.put(report)
            return
        with self._lock:
            self._step_failures[report.rank] = (report, time.monotonic())

    def _what_is_wrong(self) -> str | None:
        for rank, process in zip(self._ranks, self._processes):
            if (code := process.poll()) is not None:
                return f"rank {rank} died ({_exit_text(code)}); what it wrote last is on standard error"
        with self._lock:
            number, state = self._step
            for failed, reported_s in self._step_failures.values():
                is_over = state is StepState.DONE or number > failed.number
                is_late = state is StepState.RUNNING and time.monotonic() - reported_s > DISAGREEMENT_S
                if is_over or is_late:
                    return f"rank {failed.rank} failed step {failed.number}, which rank 0 did not fail: {failed.error}"
        return None

    # -- the end

    def stop(self) -> None:
        """Ends the processes, closes the sockets and removes the folder. May be called more than once."""
        if self._is_stopping.is_set():
            return
        self._is_stopping.set()
        if self._failure is None:
            message = encode(Exit())
            for socket in self._commands:
                socket.send(message)
        deadline = time.monotonic() + EXIT_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        if self._watcher.is_alive():
            self._watcher.join()
        else:
            self._reports.close(linger=0)
        self._context.destroy(linger=0)
        shutil.rmtree(self.directory, ignore_errors=True)


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
