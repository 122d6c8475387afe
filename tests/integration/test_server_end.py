"""How a server ends: asked to, asked twice, while it starts, without its engine, without its front end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server_process import ServerProcess

pytestmark = pytest.mark.timeout(400)

START = Callable[..., ServerProcess]


@pytest.fixture
def start(tiny_model: Callable[[str], Path]) -> Iterator[START]:
    """Starts servers over a tiny model, and sees to it that none outlives the test."""
    started: list[ServerProcess] = []

    def launch(*options: str) -> ServerProcess:
        arguments = ("--served-model-name", "m", "--num-threads", "1", "--kv-cache-bytes", "16MiB", *options)
        started.append(ServerProcess(tiny_model("llama"), *arguments))
        return started[-1]

    yield launch
    for server in started:
        server.__exit__()


class Stream(threading.Thread):
    """A caller who reads a long completion. ``text`` is all that came, error and end mark included."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.text = ""
        body = {"model": "m", "prompt": "a b c", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        self._response = post(url, body)
        self.start()

    def run(self) -> None:
        for line in self._response:
            self.text += line.decode()

    @property
    def is_whole(self) -> bool:
        return self.text.endswith("data: [DONE]\n\n")


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)


def engine_of(server: ServerProcess):
    return next(
        child for child in server.remember_children() if "inferplane.engine.process" in child.cmdline()
    )


def test_sigterm_finishes_what_is_in_flight_and_takes_nothing_new(start: START):
    server = start("--drain-timeout-s", "300").wait_ready()
    streams = [Stream(server.url, 400) for _ in range(10)]
    server.signal(signal.SIGTERM)
    refused = None
    while refused is None:
        try:
            post(server.url, {"model": "m", "prompt": "x", "max_tokens": 1}).read()
        except urllib.error.HTTPError as error:
            refused = error
    assert refused.code == 503
    assert json.load(refused)["error"]["code"] == "draining"
    assert refused.headers["Retry-After"]
    for stream in streams:
        stream.join(120)
        assert stream.is_whole
    assert server.wait() == 0
    assert server.left_over() == []
    with socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2]))):
        pass  # the port is free again


def test_an_engine_that_is_told_to_end_before_the_server_is_no_failure(start: START):
    """As a supervisor does that signals every process of a service."""
    server = start().wait_ready()
    engine = engine_of(server)
    engine.terminate()
    engine.wait(20)
    time.sleep(0.7)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "CRITICAL" not in server.log
    assert "was told to end" in server.log
    assert server.left_over() == []


def test_a_second_sigterm_does_not_wait(start: START):
    server = start().wait_ready()
    stream = Stream(server.url, 900)
    server.signal(signal.SIGTERM)
    time.sleep(0.2)
    sent_s = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - sent_s < 2
    assert server.left_over() == []
    stream.join(10)
    assert not stream.is_whole


def test_what_outlasts_the_drain_time_is_broken_off_with_an_error(start: START):
    server = start("--drain-timeout-s", "0.1").wait_ready()
    streams = [Stream(server.url, 900) for _ in range(4)]
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert server.left_over() == []
    for stream in streams:
        stream.join(10)
        assert not stream.is_whole
        assert '"error"' in stream.text


@pytest.mark.parametrize("delay_s", [0.0, 0.5, 2.0])
def test_sigterm_while_starting(start: START, delay_s: float):
    server = start()
    while not server.remember_children():  # from here on there is an engine to be ended
        time.sleep(0.005)
        assert server.popen.poll() is None, server.log
    time.sleep(delay_s)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert server.left_over() == []


def test_nothing_is_left_when_the_front_end_is_killed(start: START):
    server = start().wait_ready()
    Stream(server.url, 900)
    server.signal(signal.SIGKILL)
    server.wait()
    assert server.left_over() == []


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_without_its_engine_a_server_says_so_and_ends(start: START, signum: signal.Signals):
    server = start("--health-timeout-s", "2").wait_ready()
    stream = Stream(server.url, 900)
    os.kill(engine_of(server).pid, signum)
    struck_s = time.monotonic()
    while server.status_of("/health") == 200:
        assert time.monotonic() - struck_s < 10
        time.sleep(0.02)
    assert server.status_of("/health") == 503
    stream.join(10)
    assert '"code":"engine_dead"' in stream.text
    assert not stream.is_whole
    assert server.wait() == 1
    assert server.left_over() == []


def test_a_port_in_use_is_told_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "inferplane.cli.main", "serve", "no-such-model", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_is_told_without_a_traceback(start: START):
    command = [sys.executable, "-m", "inferplane.cli.main", "serve", "/no/such/model", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "/no/such/model" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_port_answers_while_the_model_is_loaded(start: START):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = start("--port", str(port))
    seen: list[int] = []
    codes: set[str] = set()
    while 200 not in seen:
        assert server.popen.poll() is None, server.log
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as response:
                seen.append(response.status)
        except urllib.error.HTTPError as error:
            seen.append(error.code)
            codes.add(json.load(error)["error"]["code"])
        except OSError:
            assert not seen, "the port was lost again"
        time.sleep(0.02)
    assert seen[0] == 503
    assert codes == {"starting"}
