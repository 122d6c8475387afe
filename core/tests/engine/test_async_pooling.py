"""Vectors from an engine in a process of its own, over a model that is a formula."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

import fake_engine
import vocabularies
from inferplane.config import EngineArgs, EngineConfig, PoolerConfig
from inferplane.engine.async_engine import AsyncEngine
from inferplane.engine.client import SubprocessClient
from inferplane.engine.errors import EngineDrainingError, PromptTooLongError, TaskError
from inferplane.engine.front_end import FrontEnd
from inferplane.engine.input_processor import InputProcessor
from inferplane.engine.output_processor import OutputProcessor
from inferplane.engine.spawn import EngineChild
from inferplane.request import FinishReason, ParameterError, PoolingParams, PoolingTask, SamplingParams

SUPPORT = Path(fake_engine.__file__).parent
TOKENIZER = vocabularies.byte_level()
PARAMS = PoolingParams()


def config_of(**scheduler: int) -> EngineConfig:
    config = fake_engine.fake_config(**scheduler)
    pooler = PoolerConfig("mean", ("embed",), max_dimensions=2)
    return replace(config, model=replace(config.model, pooler=pooler))


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncEngine]:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    config = config_of(max_num_seqs=4, max_num_batched_tokens=16)
    client = SubprocessClient(EngineChild("fake_engine"))
    client.configure(config, heartbeat_s=1)
    inputs = InputProcessor(
        TOKENIZER, max_model_len=400, vocab_size=256, eos_token_ids=[1], pooler=config.model.pooler
    )
    front_end = FrontEnd(config, TOKENIZER, inputs, OutputProcessor(TOKENIZER), {})
    made = AsyncEngine(client, front_end, EngineArgs())
    try:
        await made.wait_ready()
        yield made
    finally:
        await made.shutdown()


async def test_many_at_once(engine: AsyncEngine):
    prompts = [[5 + index] * (1 + index * 7 % 100) for index in range(30)]
    deltas = await asyncio.gather(
        *(engine.pool(prompt, PARAMS, request_id=str(index)) for index, prompt in enumerate(prompts))
    )
    assert [delta.pooled for delta in deltas] == [fake_engine.pooled_bytes(prompt) for prompt in prompts]
    assert all(delta.finished and delta.completions[0].finish_reason is FinishReason.STOP for delta in deltas)
    assert [delta.num_prompt_tokens for delta in deltas] == [len(prompt) for prompt in prompts]
    assert engine.num_in_flight == 0 and engine.stats().num_finished == {"stop": 30}


async def test_a_task_that_is_cancelled_frees_its_request(engine: AsyncEngine):
    hanging = [asyncio.create_task(engine.pool([7] * 400, PARAMS, request_id=f"long-{i}")) for i in range(4)]
    while not engine.stats().num_running:
        await asyncio.sleep(0.005)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert (await engine.pool([9], PARAMS, request_id="next")).pooled == fake_engine.pooled_bytes([9])
    while engine.stats().num_running:
        await asyncio.sleep(0.005)
    assert engine.stats().num_finished.get("abort") == 4
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


async def test_refusals(engine: AsyncEngine):
    with pytest.raises(PromptTooLongError, match="is 400 tokens"):
        await engine.pool([5] * 401, PARAMS, request_id="a")
    with pytest.raises(TaskError, match="cannot classify texts"):
        await engine.pool([5], PoolingParams(task=PoolingTask.CLASSIFY), request_id="a")
    with pytest.raises(ParameterError, match="dimensions is 1"):
        await engine.pool([5], PoolingParams(dimensions=1), request_id="a")
    with pytest.raises(ParameterError, match="cache_salt"):
        await engine.pool([5], PARAMS, request_id="a", cache_salt="\ud800")
    with pytest.raises(TaskError, match="cannot generate text"):
        await anext(engine.generate([5], SamplingParams(), request_id="a"))
    assert engine.num_in_flight == 0


async def test_a_request_that_breaks_its_step_fails_alone(engine: AsyncEngine):
    good, bad = await asyncio.gather(
        engine.pool([5, 6], PARAMS, request_id="good"),
        engine.pool([fake_engine.RAISES, 6], PARAMS, request_id="bad"),
    )
    assert good.pooled == fake_engine.pooled_bytes([5, 6])
    assert bad.pooled is None and bad.completions[0].finish_reason is FinishReason.ERROR


async def test_a_draining_engine_takes_nothing(engine: AsyncEngine):
    assert await engine.drain(5)
    with pytest.raises(EngineDrainingError):
        await engine.pool([5], PARAMS, request_id="a")
