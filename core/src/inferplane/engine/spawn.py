"""`EngineChild`: the engine process as its parent holds it. Light to import, because starting it comes first."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path


class EngineChild:
    """Starts the engine process, which at once begins with its slow imports.

    The parent may do its own meanwhile, and hands the child to `AsyncEngine.launch`. The child ends when this process
    does, because its standard input ends then.
    """

    SHUTDOWN_S = 5.0
    """Time for an orderly end, after which the child is killed."""

    def __init__(self, module: str = "inferplane.engine.process") -> None:
        # mkdtemp gives a folder that only this user can enter
        self.folder = Path(tempfile.mkdtemp(prefix="inferplane-"))
        self._remove_folder = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.inbox, self.outbox = (f"ipc://{self.folder / name}" for name in ("in", "out"))
        self.process = subprocess.Popen(
            # -P: what lies in the current folder must not stand in for a module
            [sys.executable, "-P", "-m", module, self.inbox, self.outbox],
            stdin=subprocess.PIPE,
            # standard output is for answers
            stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else None,
        )

    def kill(self) -> None:
        """At once, also when the child is stopped or hangs."""
        self.process.kill()

    def wait_for_end(self) -> None:
        """Blocks until the child has ended, which it is made to after `SHUTDOWN_S`."""
        try:
            self.process.wait(self.SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def clean_up(self) -> None:
        """After the end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._remove_folder()
