"""Time from the start of ``inferplane serve`` to a healthy ``/health``, beside a bare ``import torch``."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from inferplane.bench.report import Measurement

POLL_S = 0.02
LIMIT_S = 600.0


def import_torch_s() -> float:
    """Duration of a process that only imports torch: most of the start that is not ours to shorten."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - started


def measure_startup(serve_arguments: list[str]) -> Measurement:
    """Starts a server on a free port, waits until it is healthy, stops it.

    Raises RuntimeError with the server's last words when it ends before that.
    """
    port = _free_port()
    torch_s = import_torch_s()
    command = [sys.executable, "-m", "inferplane.cli.main", "serve", *serve_arguments, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while not _is_healthy(port):
                if server.poll() is not None or time.perf_counter() - started > LIMIT_S:
                    log.seek(0)
                    raise RuntimeError(f"the server did not become healthy:\n{log.read()[-2000:]}")
                time.sleep(POLL_S)
            seconds = time.perf_counter() - started
        finally:
            server.terminate()
            server.wait(30)
    extra = {"import_torch_s": round(torch_s, 2), "ratio_to_import_torch": round(seconds / torch_s, 2)}
    model = next((a for a in serve_arguments if not a.startswith("-")), "demo")
    return Measurement("inferplane", model, "startup", "default", "auto", 0, 0, 0, seconds, extra)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
