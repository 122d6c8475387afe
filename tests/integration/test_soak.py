"""Two hundred callers at once, of whom a third hang up: the others get the right answer, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from server_process import ServerProcess

NUM_CLIENTS = 200
NUM_TOKENS = 12
PROMPTS = [
    f"{subject} is"
    for subject in ("The sea", "A good book", "The best time", "My favourite food", "The old house")
] + [f"{count} reasons why people" for count in ("Two", "Three", "Ten")]


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[ServerProcess]:
    """Its own, because a test ends it."""
    options = (
        "--dtype",
        "float32",
        "--num-threads",
        "1",
        "--kv-cache-bytes",
        "256MiB",
        "--served-model-name",
        "m",
    )
    with ServerProcess(smollm2_gguf, *options, "--no-access-log") as process:
        yield process.wait_ready()


async def stream_text(
    session: aiohttp.ClientSession, prompt: str, hang_up_after: int | None = None
) -> str | None:
    """The whole text of a stream; None for a caller who hung up after some events."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    if hang_up_after is not None:
        body["max_tokens"] = 4000
    text, num_events = "", 0
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if num_events == hang_up_after:
                response.close()
                return None
            if line.startswith(b"data: [DONE]"):
                return text
            if line.startswith(b"data: "):
                text += json.loads(line[6:])["choices"][0]["text"]
                num_events += 1
    raise AssertionError(f"a stream ended without [DONE] after {text!r}")


async def probe_health(session: aiohttp.ClientSession) -> list[float]:
    """Seconds that each probe took, ten a second until cancelled."""
    durations_s: list[float] = []
    try:
        while True:
            started_s = time.monotonic()
            async with session.get("/health") as response:
                assert response.status == 200
            durations_s.append(time.monotonic() - started_s)
            await asyncio.sleep(0.1)
    except asyncio.CancelledError:
        return durations_s


@pytest.mark.timeout(600)
async def test_a_third_hangs_up_and_the_others_are_answered(server: ServerProcess):
    chance = random.Random(0)
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=500)
    async with aiohttp.ClientSession(server.url, connector=connector, timeout=limit) as session:
        alone = {prompt: await stream_text(session, prompt) for prompt in PROMPTS}
        plans = [
            (chance.choice(PROMPTS), chance.randrange(8) if i % 3 == 0 else None) for i in range(NUM_CLIENTS)
        ]

        async def client(prompt: str, hang_up_after: int | None) -> str | None:
            await asyncio.sleep(chance.random() * 0.2)
            return await stream_text(session, prompt, hang_up_after)

        probing = asyncio.create_task(probe_health(session))
        answers = await asyncio.gather(*(client(*plan) for plan in plans))
        probing.cancel()
        probes_s = await probing
    ended_s = time.monotonic()
    for (prompt, hang_up_after), answer in zip(plans, answers, strict=True):
        assert answer == (alone[prompt] if hang_up_after is None else None)
    probes_s.sort()
    assert probes_s[len(probes_s) * 99 // 100] < 1.0, "/health is held up by other requests"
    while not await asyncio.to_thread(_is_at_rest, server):
        assert time.monotonic() - ended_s < 1.0, "requests are still running a second after the last answer"
        await asyncio.sleep(0.02)
    num_left = sum(hang_up_after is not None for _, hang_up_after in plans)
    assert server.metric("requests_aborted_total") == num_left
    assert server.metric("requests_failed_total") == 0


def _is_at_rest(server: ServerProcess) -> bool:
    return (
        server.metric("requests_running") == 0
        and server.metric("requests_waiting") == 0
        and server.metric("kv_blocks_free") == server.metric("kv_blocks") > 0
    )


def test_no_process_is_left_after_sigterm(server: ServerProcess):
    """Runs last in this file."""
    assert server.remember_children()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert server.left_over() == []
