"""``inferplane serve`` as its operator runs it, and a client of it made of the standard library."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
REQUEST_LIMIT_S = 120.0


class Server:
    """A context: leaving it ends what is left. Ready once it is entered."""

    def __init__(self, model: Path, *options: str) -> None:
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed with the process
        command = [sys.executable, "-m", "inferplane.cli.main", "serve", str(model), "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self._port = 0

    def __enter__(self) -> Self:
        deadline_s = time.monotonic() + START_LIMIT_S
        while (ready := re.search(r"Ready after .*http://\S+?:(\d+)", self.log)) is None:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                log = self.log
                self.__exit__(None, None, None)
                raise RuntimeError(f"the server did not become ready:\n{log[-3000:]}")
            time.sleep(0.05)
        self._port = int(ready[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON answer. Raises RuntimeError for a status other than 200."""
        response = self._request("POST", path, body)
        text = response.read().decode()
        if response.status != 200:
            raise RuntimeError(f"POST {path}: {response.status} {text}")
        return json.loads(text)

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Events until ``[DONE]``; closing the iterator hangs up. Raises RuntimeError when the stream breaks off."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_LIMIT_S)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}), _HEADERS)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"POST {path}: {response.status} {response.read().decode()}")
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
            raise RuntimeError(f"the stream of {path} ended without [DONE]")
        finally:
            connection.close()

    def status_of(self, path: str) -> int:
        return self._request("GET", path).status

    def metrics(self) -> dict[str, float]:
        """Figures without labels, by their names after ``inferplane_``."""
        text = self._request("GET", "/metrics").read().decode()
        return {name: float(value) for name, value in re.findall(r"^inferplane_(\w+) (\S+)$", text, re.M)}

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_LIMIT_S)
        connection.request(method, path, None if body is None else json.dumps(body), _HEADERS)
        return connection.getresponse()


_HEADERS = {"Content-Type": "application/json", "Connection": "close"}
