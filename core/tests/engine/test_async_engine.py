"""The engine process and its front end, over a model that is a formula."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import psutil
import pytest

import fake_engine
import vocabularies
from inferplane.config import ConfigError, EngineArgs, EngineConfig
from inferplane.engine.async_engine import AsyncEngine
from inferplane.engine.client import SubprocessClient
from inferplane.engine.errors import (
    EmptyPromptError,
    EngineDeadError,
    EngineDrainingError,
    EngineEndedError,
    PromptTooLongError,
    QueueFullError,
)
from inferplane.engine.front_end import FrontEnd
from inferplane.engine.input_processor import InputProcessor
from inferplane.engine.output import RequestOutput
from inferplane.engine.output_processor import OutputProcessor
from inferplane.engine.spawn import EngineChild
from inferplane.request import FinishReason, ParameterError, SamplingParams

SUPPORT = Path(fake_engine.__file__).parent
TOKENIZER = vocabularies.byte_level()


@pytest.fixture(autouse=True)
def child_finds_the_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)


@asynccontextmanager
async def running(
    config: EngineConfig | None = None, *, health_timeout_s: int = 10, step_timeout_s: int = 600
) -> AsyncIterator[AsyncEngine]:
    engine = start(config, health_timeout_s=health_timeout_s, step_timeout_s=step_timeout_s)
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.shutdown()
        assert engine._client.child.process.poll() is not None, "the child is left"
        assert not engine._client.child.folder.exists(), "the sockets are left"


def start(
    config: EngineConfig | None = None, *, health_timeout_s: int = 10, step_timeout_s: int = 600
) -> AsyncEngine:
    config = config or fake_engine.fake_config()
    client = SubprocessClient(EngineChild("fake_engine"))
    client.configure(config, heartbeat_s=health_timeout_s / 8)
    inputs = InputProcessor(
        TOKENIZER,
        max_model_len=config.model.max_model_len,
        vocab_size=fake_engine.VOCAB_SIZE,
        eos_token_ids=[1],
    )
    front_end = FrontEnd(config, TOKENIZER, inputs, OutputProcessor(TOKENIZER), {})
    args = EngineArgs(health_timeout_s=health_timeout_s, step_timeout_s=step_timeout_s)
    return AsyncEngine(client, front_end, args)


async def collect(
    engine: AsyncEngine, prompt: list[int] | str, max_tokens: int, request_id: str, **params: object
) -> RequestOutput:
    settings = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    whole = RequestOutput.begin(request_id, None, [], settings.n)
    async for delta in engine.generate(prompt, settings, request_id=request_id):
        whole.grow(delta)
    return whole


async def until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def is_idle(engine: AsyncEngine) -> bool:
    stats = engine.stats()
    return (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


async def test_many_requests_at_once() -> None:
    async with running() as engine:
        prompts = [[100 + i % 50, i % 7, 5] for i in range(60)]
        tasks = [collect(engine, prompt, 10 + i % 5, f"r{i}") for i, prompt in enumerate(prompts)]
        for i, output in enumerate(await asyncio.gather(*tasks)):
            assert output.outputs[0].token_ids == fake_engine.continuation(prompts[i], 10 + i % 5)
            assert output.outputs[0].text == TOKENIZER.decode(output.outputs[0].token_ids)
            assert output.outputs[0].finish_reason == FinishReason.LENGTH
        assert engine.num_in_flight == 0
        await until(lambda: is_idle(engine), 1.0)
        assert engine.stats().num_generated_tokens == sum(10 + i % 5 for i in range(60))


async def test_ready_brings_the_final_numbers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "inferplane")
    async with running(fake_engine.fake_config(num_blocks=10, max_model_len=1000)) as engine:
        assert engine._client.child.folder.stat().st_mode & 0o077 == 0, "others can reach the sockets"
        assert engine.is_ready
        assert engine.config.model.max_model_len == 40
        assert engine.stats().num_blocks == 10
        with pytest.raises(PromptTooLongError):
            await collect(engine, [5] * 40, 1, "r")
    [line] = [r.getMessage() for r in caplog.records if "engine ready" in r.getMessage()]
    for phase in ("imports", "weights", "kv cache", "warm-up"):
        assert f"{phase} " in line


async def test_refusals_come_with_the_first_step_and_leave_nothing() -> None:
    async with running() as engine:
        for prompt, params, error in (
            ([], SamplingParams(), EmptyPromptError),
            ("", SamplingParams(), EmptyPromptError),
            ([5] * 400, SamplingParams(), PromptTooLongError),
            ([5, 999], SamplingParams(), ParameterError),
            ([5], SamplingParams(logit_bias={999: 1.0}), ParameterError),
        ):
            with pytest.raises(error):
                await anext(engine.generate(prompt, params, request_id="r"))
        assert engine.num_in_flight == 0
        output = await collect(engine, [5], 3, "r")
        assert output.outputs[0].token_ids == fake_engine.continuation([5], 3)


async def test_a_request_that_cannot_be_sent_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        monkeypatch.setattr(engine._front_end.inputs, "_logits_processors", frozenset({"p"}))
        params = SamplingParams(logits_processors={"p": object()})
        with pytest.raises(TypeError, match="object"):
            await anext(engine.generate([5], params, request_id="r"))
        assert engine.num_in_flight == 0
        assert (await collect(engine, [5], 3, "r")).outputs[0].token_ids == fake_engine.continuation([5], 3)
        assert await engine.drain(1.0)


async def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    async with (
        running() as engine,
        aclosing(engine.generate([5], SamplingParams(max_tokens=50), request_id="r")) as first,
    ):
        await anext(first)
        with pytest.raises(ValueError, match="'r' is in use"):
            await anext(engine.generate([6], SamplingParams(), request_id="r"))
        token_count = 1
        async for delta in first:
            token_count = delta.completions[0].num_output_tokens
        assert token_count == 50


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_early_frees_everything_without_another_request(n: int) -> None:
    async with running() as engine:
        for i in range(8):
            stream = engine.generate([5, i], SamplingParams(max_tokens=390, n=n), request_id=f"r{i}")
            await anext(stream)
            await stream.aclose()
        await until(lambda: is_idle(engine), 1.0)
        num_steps = engine.stats().num_steps
        await asyncio.sleep(0.1)
        assert engine.stats().num_steps == num_steps, "the engine still works for nobody"
        assert engine.num_in_flight == 0


async def test_cancelling_at_any_moment_leaves_nothing() -> None:
    async with running(fake_engine.fake_config(num_blocks=40, max_model_len=100, max_num_seqs=4)) as engine:
        for round_number in range(20):
            tasks = [
                asyncio.create_task(collect(engine, [5, i] * 10, 70, f"r{round_number}-{i}", n=1 + i % 3))
                for i in range(8)
            ]
            await asyncio.sleep(0.003 * round_number)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert engine.num_in_flight == 0
        await until(lambda: is_idle(engine), 1.0)
        output = await collect(engine, [5], 3, "last")
        assert output.outputs[0].token_ids == fake_engine.continuation([5], 3)


async def test_an_id_can_be_used_again_at_once() -> None:
    async with running() as engine:
        for i in range(30):
            stream = engine.generate([5, i], SamplingParams(max_tokens=300), request_id="r")
            await anext(stream)
            await stream.aclose()
            # outputs of the dropped request are still on their way
            output = await collect(engine, [9, i], 3, "r")
            assert output.outputs[0].token_ids == fake_engine.continuation([9, i], 3)


async def test_a_stop_string_ends_the_request_in_the_core_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        abort, aborted = engine._client.abort, []
        monkeypatch.setattr(engine._client, "abort", lambda ids: (aborted.extend(ids), abort(ids)))
        text = TOKENIZER.decode(fake_engine.continuation([5], 30))
        output = await collect(engine, [5], 300, "r", stop=[text[10:14]])
        assert output.outputs[0].text == text[: text.index(text[10:14])]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
            FinishReason.STOP,
            text[10:14],
        )
        assert len(aborted) == 1, "the core would go on to the 300th token"
        await until(lambda: is_idle(engine), 1.0)


async def test_several_completions() -> None:
    async with running() as engine:
        output = await collect(engine, [5, 6], 12, "r", n=4)
        assert [c.index for c in output.outputs] == [0, 1, 2, 3]
        for completion in output.outputs:
            assert completion.token_ids == fake_engine.continuation([5, 6], 12)
            assert completion.finish_reason == FinishReason.LENGTH


async def test_a_slow_consumer_gets_what_piled_up_as_one() -> None:
    async with running() as engine:
        deltas = []
        async for delta in engine.generate([5], SamplingParams(max_tokens=60), request_id="r"):
            deltas.append(delta)
            await asyncio.sleep(0.05)
        assert len(deltas) < 30
        token_ids = [token_id for delta in deltas for token_id in delta.completions[0].token_ids]
        assert token_ids == fake_engine.continuation([5], 60)


async def test_one_bad_request_fails_alone() -> None:
    async with running() as engine:
        good = [asyncio.create_task(collect(engine, [100, i], 40, f"good{i}")) for i in range(4)]
        await asyncio.sleep(0.02)
        bad = await collect(engine, [fake_engine.RAISES], 5, "bad")
        assert bad.outputs[0].finish_reason == FinishReason.ERROR
        assert "this request breaks the step" in (bad.outputs[0].error or "")
        for i, output in enumerate(await asyncio.gather(*good)):
            assert output.outputs[0].token_ids == fake_engine.continuation([100, i], 40)
        engine.check_health()


async def test_a_full_queue_turns_requests_away() -> None:
    config = fake_engine.fake_config(max_num_seqs=2, max_num_waiting=3)
    async with running(config) as engine:
        tasks = [asyncio.create_task(collect(engine, [5, i], 30, f"r{i}")) for i in range(12)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [r for r in results if isinstance(r, QueueFullError)]
        assert len(refused) == 12 - 5
        assert all(isinstance(r, (QueueFullError, RequestOutput)) for r in results)
        assert engine.num_in_flight == 0
        await collect(engine, [5], 3, "later")


async def test_draining_finishes_what_is_in_flight() -> None:
    async with running() as engine:
        task = asyncio.create_task(collect(engine, [5], 50, "r"))
        await asyncio.sleep(0.02)
        drained = asyncio.create_task(engine.drain(10.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineDrainingError):
            await anext(engine.generate([5], SamplingParams(), request_id="new"))
        assert await drained
        assert task.done() or (await task).finished
        assert (await task).outputs[0].token_ids == fake_engine.continuation([5], 50)


async def test_draining_has_a_limit() -> None:
    async with running() as engine:
        stream = engine.generate([5], SamplingParams(max_tokens=390), request_id="r")
        await anext(stream)
        assert not await engine.drain(0.05)
        await stream.aclose()


async def test_shutting_down_ends_what_is_in_flight() -> None:
    async with running() as engine:
        task = asyncio.create_task(collect(engine, [5], 390, "r"))
        await asyncio.sleep(0.02)
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await task
        with pytest.raises(EngineDeadError):
            await collect(engine, [5], 3, "late")


@pytest.mark.parametrize(
    ("architecture", "error", "message"),
    [
        ("RaisesConfigError", ConfigError, "no such dtype"),
        ("Raises", EngineDeadError, r"ZeroDivisionError: the loader is broken"),
        ("Dies", EngineDeadError, "exit code 3"),
    ],
)
async def test_a_failed_start_says_why(architecture: str, error: type[Exception], message: str) -> None:
    engine = start(fake_engine.fake_config(architecture=architecture))
    with pytest.raises(error, match=message):
        await engine.wait_ready()
    assert not engine.is_ready
    with pytest.raises(EngineDeadError):
        engine.check_health()
    await engine.shutdown()
    assert engine._client.child.process.returncode not in (0, None)


async def test_shutting_down_while_the_model_loads() -> None:
    engine = start(fake_engine.fake_config(architecture="LoadsForever"))
    engine._client.child.SHUTDOWN_S = 0.5  # type: ignore[misc]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.wait_ready(), 0.3)
    await engine.shutdown()
    assert engine._client.child.process.poll() is not None


# Faults. The times are those that callers rely on.


async def in_flight(engine: AsyncEngine) -> list[asyncio.Task[RequestOutput]]:
    tasks = [asyncio.create_task(collect(engine, [5, i], 390, f"r{i}")) for i in range(4)]
    await until(lambda: engine.stats().num_running == 4, 5.0)
    return tasks


async def all_die(tasks: list[asyncio.Task[RequestOutput]], limit_s: float, message: str) -> None:
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), limit_s)
    for result in results:
        assert isinstance(result, EngineDeadError)
        assert message in str(result)


async def test_a_killed_engine_is_noticed_within_a_second() -> None:
    async with running() as engine:
        tasks = await in_flight(engine)
        os.kill(engine._client.child.process.pid, signal.SIGKILL)
        await all_die(tasks, 1.5, "SIGKILL")
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            engine.check_health()
        assert not engine.is_ready


async def test_requests_to_a_dead_engine_leave_no_trace() -> None:
    async with running() as engine:
        engine._client.child.kill()
        await until(lambda: not engine.is_ready, 2.0)
        for _ in range(20):
            with pytest.raises(EngineDeadError) as caught:
                await anext(engine.generate([5], SamplingParams(), request_id="r"))
        assert len(traceback.extract_tb(caught.value.__traceback__)) < 10


async def test_a_stopped_engine_is_noticed_in_the_configured_time() -> None:
    async with running(health_timeout_s=1) as engine:
        tasks = await in_flight(engine)
        os.kill(engine._client.child.process.pid, signal.SIGSTOP)
        await all_die(tasks, 2.0, "sign of life")
        with pytest.raises(EngineDeadError):
            engine.check_health()


async def test_a_hanging_step_is_noticed_and_a_long_one_is_not() -> None:
    async with running(health_timeout_s=1, step_timeout_s=2) as engine:
        started = time.monotonic()
        task = asyncio.create_task(collect(engine, [fake_engine.HANGS], 5, "r"))
        await all_die([task], 5.0, "hangs")
        assert time.monotonic() - started > 2.0


async def test_a_process_that_ends_by_itself_is_noticed() -> None:
    async with running() as engine:
        tasks = await in_flight(engine)
        tasks.append(asyncio.create_task(collect(engine, [fake_engine.ENDS_PROCESS], 5, "bad")))
        await all_die(tasks, 1.5, "exit code 7")


async def test_a_dead_worker_ends_the_engine_with_its_cause() -> None:
    async with running() as engine:
        tasks = await in_flight(engine)
        tasks.append(asyncio.create_task(collect(engine, [fake_engine.LOSES_WORKER], 5, "bad")))
        await all_die(tasks, 1.5, "rank 1 is gone")


async def test_a_pause_of_the_front_end_is_not_blamed_on_the_engine() -> None:
    async with running(health_timeout_s=1) as engine:
        time.sleep(1.5)  # noqa: ASYNC251 - blocks the loop on purpose
        await asyncio.sleep(0.3)
        engine.check_health()
        assert (await collect(engine, [5], 3, "r")).finished


async def test_sigterm_finishes_what_is_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as engine:
        task = asyncio.create_task(collect(engine, [5], 60, "r"))
        await until(lambda: engine.stats().num_running == 1, 5.0)
        os.kill(engine._client.child.process.pid, signal.SIGTERM)
        assert (await task).outputs[0].token_ids == fake_engine.continuation([5], 60)
        await until(lambda: engine._client.child.process.poll() is not None, 3.0)
        assert engine._client.child.process.returncode == 0
        await until(lambda: not engine.is_ready, 3.0)
        with pytest.raises(EngineEndedError, match="was told to end"):
            engine.check_health()
    assert [record.levelname for record in caplog.records if "told to end" in record.message] == ["WARNING"]


PARENT = """
import asyncio, sys
sys.path.insert(0, {here!r})
import test_async_engine as t

async def main():
    engine = t.start()
    await engine.wait_ready()
    asyncio.create_task(t.collect(engine, [5], 390, "r"))
    await asyncio.sleep(0.1)
    print(engine._client.child.process.pid, engine._client.child.folder, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_engine_ends_when_its_front_end_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(here=str(Path(__file__).parent))],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    child = psutil.Process(int(pid))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    # whoever adopts orphans may leave a zombie
    deadline = time.monotonic() + 2.0
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine outlives its front end"
        time.sleep(0.02)
    assert not Path(folder).exists()
