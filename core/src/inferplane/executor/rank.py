"""The process of one rank other than the first: ``python -m inferplane.executor.rank DIRECTORY RANK WORLD_SIZE``.

Started by `RankProcesses`, which holds the other end of its standard input. That pipe's end of file means that the
parent is gone, however it went, and ends the process at once.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import traceback
from typing import Any

import zmq

from inferplane.api.comm import ProcessGroup
from inferplane.api.executor import start_worker
from inferplane.api.kv import KVCacheConfig, KVCacheGroup
from inferplane.api.worker import Worker
from inferplane.executor.messages import (
    CALLABLE,
    Answer,
    Call,
    DidFail,
    Execute,
    Exit,
    InitKVCache,
    Question,
    Start,
    StepFailed,
    commands_address,
    decode_command,
    encode,
    reports_address,
)
from inferplane.plugins.blame import blame
from inferplane.plugins.record import describe


class Rank:
    """Obeys commands one after another until `Exit`."""

    def __init__(self, directory: str, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._commands.bind(commands_address(directory, rank))
        self._reports = self._context.socket(zmq.PUSH)
        self._reports.connect(reports_address(directory))
        self._worker: Worker | None = None
        self._failed_number: int | None = None
        """The step that raised here, until rank 0 has asked about it. Nothing is executed meanwhile: this rank has not
        computed what the others may have."""

    def run(self) -> None:
        while True:
            command = decode_command(self._commands.recv())
            if isinstance(command, Exit):
                break
            if isinstance(command, Execute):
                self._execute(command)
            else:
                self._answer(command)
        if self._worker is not None:
            self._worker.close()
        self._context.destroy(linger=0)

    def _execute(self, command: Execute) -> None:
        if self._failed_number is not None:
            return
        try:
            self.worker.execute(command.plan)
            self.worker.accept()
        except Exception as error:
            self._failed_number = command.number
            self._reports.send(encode(StepFailed(self._rank, command.number, _describe(error))))

    def _answer(self, command: Question) -> None:
        try:
            answer = Answer(self._rank, command.call_id, value=self._obey(command))
        except Exception as error:
            answer = Answer(self._rank, command.call_id, error=_describe(error))
        self._reports.send(encode(answer))

    def _obey(self, command: Question) -> int | None:
        match command:
            case Start():
                group = ProcessGroup(self._rank, self._world_size, command.init_method)
                self._worker = start_worker(command.config, group)
                return None
            case Call():
                if command.method not in CALLABLE:
                    raise ValueError(
                        f"a rank is not called by {command.method!r}; it knows {', '.join(CALLABLE)}"
                    )
                value: Any = getattr(self.worker, command.method)()
                return value if isinstance(value, int) else None
            case InitKVCache():
                specs = self.worker.kv_cache_specs()
                groups = tuple(
                    KVCacheGroup(tuple(names), specs[names[0]], pool) for names, pool in command.groups
                )
                num_blocks, *more = command.num_blocks
                self.worker.init_kv_cache(KVCacheConfig(num_blocks, groups, tuple(more)))
                return None
            case DidFail():
                did_fail = self._failed_number == command.number
                self._failed_number = None
                return int(did_fail)

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("the rank has no worker: Start comes before any other command")
        return self._worker


def _describe(error: Exception) -> str:
    """What failed, in a line, and the traceback: of the plugin at fault from where it was entered."""
    fault = blame(error)
    if fault is not None:
        return f"{fault.message}\n{fault.traceback}"
    return f"{describe(error)}\n{traceback.format_exc().rstrip()}"


def _end_with_parent(directory: str) -> None:
    while os.read(0, 1):
        continue
    # the main thread may be waiting for ranks that are gone, so there is no asking it; the parent can clean up no more
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def main() -> None:
    directory, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    threading.Thread(target=_end_with_parent, args=(directory,), name="end-with-parent", daemon=True).start()
    Rank(directory, rank, world_size).run()


if __name__ == "__main__":
    main()
