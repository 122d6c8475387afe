"""Over real sockets: callers who hang up, bodies that are too large, the end of the server."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import httpx
import pytest

from http_answers import error_of
from inferplane_server import body, http_protocol, sse
from inferplane_server.http_server import HttpServer
from inferplane_server.serving import ServeError, bind
from inferplane_server.settings import ServerSettings
from scripted_engine import ScriptedEngine, answer_text

GENERATING = ["/v1/completions", "/v1/chat/completions"]


@asynccontextmanager
async def serving(engine: ScriptedEngine, **settings) -> AsyncIterator[HttpServer]:
    listener = bind("127.0.0.1", 0)
    server = HttpServer(engine, ServerSettings(**settings), listener)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        listener.close()


def body_of(route: str, **fields) -> dict:
    if route.endswith("chat/completions"):
        return {"model": "fake", "messages": [{"role": "user", "content": "hi"}], **fields}
    return {"model": "fake", "prompt": "hi", **fields}


async def until(condition: Callable[[], bool], limit_s: float = 3.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about in time"
        await asyncio.sleep(0.005)


async def send_raw(
    server: HttpServer, route: str, body: dict
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await send_on(await asyncio.open_connection(host, int(port)), route, body)


async def send_on(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], route: str, body: dict
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    _, writer = connection
    payload = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    writer.write(head.encode() + payload)
    await writer.drain()
    return connection


@pytest.mark.parametrize("route", GENERATING)
@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"stream": True}, {"stream": True, "n": 4}])
@pytest.mark.parametrize("prompts", [1, 3])
async def test_a_caller_who_hangs_up_aborts_the_request(route, fields, prompts):
    engine = ScriptedEngine(delay_s=0.02)
    body = body_of(route, max_tokens=100, **fields)
    if prompts > 1 and "prompt" in body:
        body["prompt"] = ["hi"] * prompts
    async with serving(engine) as server:
        _, writer = await send_raw(server, route, body)
        await until(lambda: len(engine.running) == (prompts if "prompt" in body else 1))
        await asyncio.sleep(0.1)
        num_running = len(engine.running)
        writer.transport.abort()
        await until(lambda: not engine.running, 1.0)
        assert len(engine.aborted) == num_running
        async with httpx.AsyncClient(base_url=server.url) as client:
            text = (await client.get("/metrics")).text
            assert f"inferplane_requests_aborted_total {num_running}.0" in text
            assert 'inferplane_requests_success_total{finish_reason="length"} 0.0' in text


async def test_a_caller_who_hangs_up_before_the_first_token_aborts_too():
    engine = ScriptedEngine(delay_s=60)
    async with serving(engine) as server:
        for stream in (False, True):
            _, writer = await send_raw(server, "/v1/completions", body_of("/v1/completions", stream=stream))
            await until(lambda: bool(engine.running))
            writer.close()
            await until(lambda: not engine.running, 1.0)


async def dawdling_caller(
    server: HttpServer, body: dict
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Has sent its request, and reads no more of the answer than small buffers hold."""
    server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those that it accepts inherit it
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(server._listener.getsockname())
    return await send_on(
        await asyncio.open_connection(sock=connection, limit=1024),
        "/v1/completions",
        {**body, "stream": True},
    )


async def test_a_caller_who_reads_slowly_holds_the_stream_up_and_misses_nothing():
    num_tokens = 1500
    engine = ScriptedEngine(max_model_len=num_tokens + 10)
    async with serving(engine) as server:
        body = body_of("/v1/completions", max_tokens=num_tokens)
        reader, writer = await dawdling_caller(server, body)
        await asyncio.sleep(1.0)
        assert engine.running, "everything was put into memory"
        text, line = "", b"x"
        while line.strip() != b"data: [DONE]":
            line = await reader.readline()
            assert line, "the stream broke off"
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
        assert text == answer_text("hi", num_tokens)
        writer.close()


async def test_a_caller_who_reads_slowly_and_hangs_up_aborts_too():
    engine = ScriptedEngine(max_model_len=3000)
    async with serving(engine) as server:
        _, writer = await dawdling_caller(server, body_of("/v1/completions", max_tokens=2000))
        await asyncio.sleep(0.5)
        assert engine.running
        writer.transport.abort()
        await until(lambda: not engine.running)
        assert len(engine.aborted) == 1


async def test_two_requests_on_one_connection_do_not_disturb_each_other():
    async with serving(ScriptedEngine()) as server, httpx.AsyncClient(base_url=server.url) as client:
        for stream in (True, False, True):
            response = await client.post("/v1/completions", json=body_of("/v1/completions", stream=stream))
            assert response.status_code == 200


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_a_body_of_25_megabytes_is_413_and_holds_up_nobody(route):
    big = b'{"model": "fake", "prompt": "' + b"x" * 25_000_000 + b'"}'
    async with (
        serving(ScriptedEngine()) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as client,
    ):
        posting = asyncio.create_task(
            client.post(route, content=big, headers={"Content-Type": "application/json"})
        )
        slowest_s = 0.0
        async with httpx.AsyncClient(base_url=server.url) as prober:
            while not posting.done():
                started_s = time.monotonic()
                assert (await prober.get("/health")).status_code == 200
                slowest_s = max(slowest_s, time.monotonic() - started_s)
        error_of(await posting, 413, code="request_too_large")
        assert slowest_s < 1.0


async def test_a_caller_who_asks_before_sending_is_told_at_once():
    async with serving(ScriptedEngine(), max_body_bytes=1000) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 50000000\r\nExpect: 100-continue\r\n\r\n"
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        writer.close()


@asynccontextmanager
async def connected(server: HttpServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def raw_error(answer: bytes) -> tuple[int, dict]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "start", [b"GET /health HTTP/1.1\r\nX-Endless: ", b"GET /", b"GET /health HTTP/1.1\r\n"]
)
async def test_a_head_without_end_is_broken_off_while_others_are_served(start):
    piece = b"X-Y: z\r\n" * 8192 if start.endswith(b"\n") else b"a" * 2**16
    async with serving(ScriptedEngine(), api_keys=("key",)) as server, connected(server) as (reader, writer):
        writer.write(start)
        sent = 0
        with suppress(ConnectionError):
            while sent < 2**26 and not reader.at_eof():
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
                await asyncio.sleep(0)
        assert sent < 2**24
        async with httpx.AsyncClient(base_url=server.url) as client:
            assert (await client.get("/health")).status_code == 200


async def test_a_head_that_is_too_large_is_431():
    async with serving(ScriptedEngine()) as server, connected(server) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nX-Long: ")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b"a" * (http_protocol.MAX_HEAD_BYTES + 1))
        status, error = raw_error(await reader.read())
    assert (status, error["code"]) == (431, "invalid_http")


async def test_a_head_that_dawdles_is_408_and_a_body_may(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.2)
    async with serving(ScriptedEngine()) as server:
        async with connected(server) as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\n")
            status, _ = raw_error(await asyncio.wait_for(reader.read(), 5))
            assert status == 408
        async with connected(server) as (reader, writer):
            assert await asyncio.wait_for(reader.read(), 5) == b""
        payload = json.dumps(body_of("/v1/completions")).encode()
        async with connected(server) as (reader, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(payload))
            await asyncio.sleep(0.5)
            writer.write(payload)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_body_that_stops_coming_is_408(monkeypatch):
    monkeypatch.setattr(body, "MAX_PAUSE_S", 0.2)
    async with serving(ScriptedEngine()) as server, connected(server) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n")
        for _ in range(4):
            await asyncio.sleep(0.1)
            writer.write(b"{")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert raw_error(answer)[0] == 408
        assert answer.count(b"HTTP/1.1") == 1


async def test_bodies_that_are_still_coming_do_not_hold_up_the_end(caplog):
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(ScriptedEngine()))
        for _ in range(5):
            _, writer = await stack.enter_async_context(connected(server))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        await asyncio.sleep(0.2)
        started_s = time.monotonic()
        await server.stop()
        assert time.monotonic() - started_s < 2.0
    assert "Traceback" not in caplog.text


async def test_an_answer_on_its_way_survives_what_is_sent_behind_its_request(monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.1)
    async with serving(ScriptedEngine(delay_s=0.05)) as server:
        reader, writer = await send_raw(server, "/v1/completions", body_of("/v1/completions", max_tokens=8))
        writer.write(b"GET /health HTTP/1.1\r\nX-Slow: ")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.transport.abort()


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00\x01", b"FOO /health HTTP/1.1\r\n\r\n", b"GET health HTTP/1.1\r\n\r\n"]
)
async def test_what_is_no_http_gets_the_envelope_too(junk):
    async with serving(ScriptedEngine()) as server, connected(server) as (reader, writer):
        writer.write(junk)
        status, error = raw_error(await asyncio.wait_for(reader.read(), 5))
    assert (status, error["code"], error["type"]) == (400, "invalid_http", "invalid_request_error")


async def test_draining_finishes_streams_refuses_others_and_then_stops():
    engine = ScriptedEngine(delay_s=0.03)
    async with serving(engine) as server, httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        body = body_of("/v1/completions", stream=True, max_tokens=20)
        streams = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(10)]
        await until(lambda: len(engine.running) == 10)
        draining = asyncio.create_task(server.drain())
        await asyncio.sleep(0.05)
        error_of(await client.post("/v1/completions", json=body), 503, code="draining")
        await draining
        for response in await asyncio.gather(*streams):
            assert response.text.endswith("data: [DONE]\n\n")


async def test_what_does_not_finish_in_the_drain_time_is_broken_off_with_an_error():
    engine = ScriptedEngine(delay_s=0.05)
    async with (
        serving(engine, drain_timeout_s=0.1) as server,
        httpx.AsyncClient(base_url=server.url, timeout=30) as client,
    ):
        body = body_of("/v1/completions", stream=True, max_tokens=100)
        stream = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: bool(engine.running))
        started_s = time.monotonic()
        await server.drain()
        assert time.monotonic() - started_s < 1.0
        engine.die_after = 5
        text = (await stream).text
        assert "engine_dead" in text
        assert "[DONE]" not in text


def test_an_address_in_use_is_a_clear_error():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"port {port}.*--port"):
            bind("127.0.0.1", port)


def test_a_host_that_is_not_here_is_a_clear_error():
    with pytest.raises(ServeError, match=r"192\.0\.2\.1"):
        bind("192.0.2.1", 0)
    with pytest.raises(ServeError, match="--host"):
        bind("no such host", 0)


async def test_every_answer_has_the_request_id_that_it_was_asked_with_or_a_new_one():
    async with (
        serving(ScriptedEngine()) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        for method, path, body in (
            ("GET", "/health", None),
            ("GET", "/nowhere", None),
            ("POST", "/v1/completions", body_of("/v1/completions")),
            ("POST", "/v1/completions", body_of("/v1/completions", stream=True)),
            ("POST", "/v1/completions", body_of("/v1/completions", temperature=-1)),
        ):
            response = await client.request(method, path, json=body, headers={"X-Request-Id": "mine/1"})
            assert response.headers.get_list("x-request-id") == ["mine/1"]
            new = {(await client.request(method, path, json=body)).headers["x-request-id"] for _ in range(2)}
            assert len(new) == 2
            assert all(name.startswith("req-") for name in new)
        for strange in ("a b", "x" * 129, "é"):
            response = await client.get("/health", headers={"X-Request-Id": strange.encode()})
            assert response.headers["x-request-id"].startswith("req-")


async def test_an_error_that_was_not_foreseen_has_the_id_in_answer_and_log(caplog: pytest.LogCaptureFixture):
    async with (
        serving(ScriptedEngine(refusal=ZeroDivisionError("a bug"))) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        body = body_of("/v1/completions")
        response = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
        error_of(response, 500)
        assert response.headers["x-request-id"] == "mine"
    assert any(record.message.endswith("failed, request mine") for record in caplog.records)


@pytest.mark.parametrize("route", GENERATING)
async def test_a_stream_that_waits_sends_comments(monkeypatch: pytest.MonkeyPatch, route: str):
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    engine = ScriptedEngine(delay_s=0.18)
    async with (
        serving(engine) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        response = await client.post(route, json=body_of(route, stream=True, max_tokens=3))
        events = response.text.split("\n\n")
        assert events[0] == ": still here"
        assert 3 <= events.count(": still here") <= 12
        assert [each for each in events if not each.startswith((":", "data: "))] == [""]
        assert events[-2:] == ["data: [DONE]", ""]
        # an error after a comment can only be an event
        engine.die_after = 1
        response = await client.post(route, json=body_of(route, stream=True, max_tokens=3))
        assert response.status_code == 200
        assert '"engine_dead"' in response.text
        assert "[DONE]" not in response.text
