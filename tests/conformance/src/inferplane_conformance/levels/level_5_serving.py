"""Level 5: the real server on the device answers, streams, lets go of callers who leave, and drains."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from inferplane.plugins import load_plugins
from inferplane_conformance.prompts import prompt
from inferplane_conformance.pytest_plugin import KitOptions
from inferplane_conformance.server import Server
from inferplane_conformance.subject import Subject
from inferplane_conformance.transformers_oracle import complete

NUM_TOKENS = 12
NUM_CALLERS = 8
"""Of the soak, at the same time."""
SETTLE_LIMIT_S = 10.0
_server: list[Server] = []
"""The one that the tests of this file share, until `test_drain` ends it."""


@pytest.fixture
def server(subject: Subject, llama_folder: Path) -> Server:
    if "serve" not in {command.name for command in load_plugins(quiet=True).commands()}:
        pytest.skip('there is no server; get it with: pip install "inferplane[server]"')
    if not _server:
        options = ("--device", subject.name, "--dtype", "float32", "--max-model-len", "256")
        _server.append(
            Server(llama_folder, *options, "--served-model-name", "m", "--no-access-log").__enter__()
        )
    return _server[0]


@pytest.fixture(scope="module", autouse=True)
def end_of_server() -> Iterator[None]:
    yield
    for server in _server:
        server.__exit__(None, None, None)
    _server.clear()


def body(length: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    common = {"model": "m", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return {**common, "prompt": prompt(length, seed), **more}


def expected_logprobs(folder: Path, length: int, seed: int = 0) -> list[float]:
    return complete(folder, prompt(length, seed), NUM_TOKENS).logprobs


def settle(server: Server) -> dict[str, float]:
    """The figures once nothing is left of any request."""
    deadline_s = time.monotonic() + SETTLE_LIMIT_S
    while True:
        metrics = server.metrics()
        is_idle = metrics["requests_running"] == metrics["requests_waiting"] == 0
        if is_idle and metrics["kv_blocks_free"] == metrics["kv_blocks"] > 0:
            return metrics
        assert time.monotonic() < deadline_s, f"requests or blocks are held although nobody asks: {metrics}"
        time.sleep(0.05)


def test_answers(server: Server, llama_folder: Path) -> None:
    assert server.status_of("/health") == 200
    answer = server.post("/v1/completions", body(40, logprobs=1))
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    wanted = expected_logprobs(llama_folder, 40)
    found = choice["logprobs"]["token_logprobs"]
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-3
    settle(server)


def test_a_stream_says_what_the_whole_answer_says(server: Server) -> None:
    whole = server.post("/v1/completions", body(17))["choices"][0]["text"]
    events = list(server.stream("/v1/completions", body(17)))
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    settle(server)


def test_chat(server: Server) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    request = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    [choice] = server.post("/v1/chat/completions", request)["choices"]
    assert choice["message"]["role"] == "assistant"
    settle(server)


def test_bad_requests_are_refused(server: Server) -> None:
    for wrong in ({"max_tokens": -1}, {"temperature": "hot"}, {"prompt": [10**9]}):
        with pytest.raises(RuntimeError, match=r": 4[02]\d "):
            server.post("/v1/completions", body(3, **wrong))
    settle(server)


def test_who_leaves_is_let_go(server: Server) -> None:
    before = settle(server)["requests_aborted_total"]
    for _ in range(3):
        stream = server.stream("/v1/completions", body(20, max_tokens=200))
        assert len(list(islice(stream, 2))) == 2
        stream.close()
    after = settle(server)["requests_aborted_total"]
    assert after == before + 3


def test_soak(server: Server, kit_options: KitOptions) -> None:
    """Callers of all kinds at once for some seconds; every answer is the one that it is alone."""
    lengths = range(1, 90, 11)
    alone = {length: server.post("/v1/completions", body(length))["choices"][0]["text"] for length in lengths}
    deadline_s = time.monotonic() + kit_options.soak_s

    def call(number: int) -> int:
        chance, num_answers = random.Random(number), 0
        while time.monotonic() < deadline_s:
            length = chance.choice(list(lengths))
            kind = chance.randrange(4)
            if kind == 0:
                stream = server.stream("/v1/completions", body(length, max_tokens=100))
                list(islice(stream, chance.randrange(4)))
                stream.close()
            elif kind == 1:
                events = server.stream("/v1/completions", body(length))
                assert "".join(event["choices"][0]["text"] for event in events) == alone[length]
            else:
                assert server.post("/v1/completions", body(length))["choices"][0]["text"] == alone[length]
            num_answers += 1
        return num_answers

    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        counts = list(pool.map(call, range(NUM_CALLERS)))
    assert min(counts) > 0, "a caller was never answered"
    assert settle(server)["requests_failed_total"] == 0


def test_drain(server: Server) -> None:
    """SIGTERM lets what is in flight finish, and leaves nothing behind. The last test: it ends the server."""
    whole = server.post("/v1/completions", body(30, max_tokens=60))["choices"][0]["text"]
    stream = server.stream("/v1/completions", body(30, max_tokens=60))
    text = next(stream)["choices"][0]["text"]
    server.process.send_signal(signal.SIGTERM)
    text += "".join(event["choices"][0]["text"] for event in stream)
    assert text == whole
    assert server.process.wait(60) == 0
