"""`ServerProcess`: ``inferplane serve`` as its operator runs it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

START_LIMIT_S = 150.0
STOP_LIMIT_S = 60.0


class ServerProcess:
    """A context: leaving it kills what is left."""

    def __init__(self, *arguments: str | Path, environment: dict[str, str] | None = None) -> None:
        self._log_file = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-m", "inferplane.cli.main", "serve", *map(str, arguments)]
        if "--port" not in arguments:
            command += ["--port", "0"]
        self.popen = subprocess.Popen(
            command, stdout=self._log_file, stderr=subprocess.STDOUT, env=environment
        )
        self.process = psutil.Process(self.popen.pid)
        self._family: set[psutil.Process] = {self.process}

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remember_children()
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.popen.wait()
        self._log_file.close()

    @property
    def log(self) -> str:
        self._log_file.seek(0)
        return self._log_file.read().decode(errors="replace")

    @property
    def url(self) -> str:
        """Known once the server is ready."""
        found = re.search(r"Ready after .*(http://\S+)", self.log)
        assert found, f"the server is not ready:\n{self.log[-3000:]}"
        return found[1]

    def wait_ready(self) -> ServerProcess:
        deadline_s = time.monotonic() + START_LIMIT_S
        while "Ready after" not in self.log:
            assert self.popen.poll() is None, (
                f"the server ended with {self.popen.returncode}:\n{self.log[-3000:]}"
            )
            assert time.monotonic() < deadline_s, f"the server did not become ready:\n{self.log[-3000:]}"
            time.sleep(0.05)
        self.remember_children()
        return self

    def remember_children(self) -> set[psutil.Process]:
        """All processes below the server's, as of now; they count in `left_over` from now on."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family |= set(self.process.children(recursive=True))
        return self._family - {self.process}

    def left_over(self, limit_s: float = 3.0) -> list[psutil.Process]:
        """Processes of the server that are still there after a while."""
        deadline_s = time.monotonic() + limit_s
        while (alive := [p for p in self._family if _is_alive(p)]) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return alive

    def signal(self, signum: signal.Signals) -> None:
        self.remember_children()
        self.popen.send_signal(signum)

    def wait(self, limit_s: float = STOP_LIMIT_S) -> int:
        """The exit code."""
        return self.popen.wait(limit_s)

    def status_of(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    def metric(self, name: str) -> float:
        """A figure without labels from ``/metrics``."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as response:
            text = response.read().decode()
        found = re.search(rf"^inferplane_{name} (\S+)$", text, re.MULTILINE)
        assert found, f"/metrics has no {name}"
        return float(found[1])


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
