from __future__ import annotations

import asyncio

import pytest

from inferplane.engine.delta_stream import DeltaStream
from inferplane.engine.output import CompletionDelta, RequestDelta


def delta(text: str) -> RequestDelta:
    return RequestDelta("r", [CompletionDelta(0, text, [len(text)])], num_prompt_tokens=1)


async def test_events_come_in_order_and_together_when_they_piled_up() -> None:
    stream = DeltaStream()
    stream.put(delta("a"))
    assert (await stream.next()).completions[0].text == "a"
    stream.put(delta("b"))
    stream.put(delta("cc"))
    merged = (await stream.next()).completions[0]
    assert (merged.text, merged.token_ids) == ("bcc", [1, 2])


async def test_a_waiting_consumer_is_woken() -> None:
    stream = DeltaStream()
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.put(delta("a"))
    assert (await waiting).completions[0].text == "a"


async def test_a_failure_comes_after_what_was_there() -> None:
    stream = DeltaStream()
    stream.put(delta("a"))
    stream.fail(RuntimeError("gone"))
    assert (await stream.next()).completions[0].text == "a"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            await stream.next()


async def test_a_cancelled_wait_loses_nothing() -> None:
    stream = DeltaStream()
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    waiting.cancel()
    stream.put(delta("a"))
    assert (await stream.next()).completions[0].text == "a"
