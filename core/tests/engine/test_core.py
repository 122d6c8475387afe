from __future__ import annotations

import pytest

import fake_engine
from inferplane.api.worker import PendingStep
from inferplane.config import EngineConfig
from inferplane.engine import core as core_module
from inferplane.engine.core import EngineCore
from inferplane.executor import WorkerDiedError
from inferplane.plan import StepPlan, StepResult
from inferplane.plugins import load_plugins
from inferplane.request import EngineOutput, EngineRequest, FinishReason, SamplingParams


@pytest.fixture(autouse=True)
def fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "make_executor", fake_engine.FakeExecutor)
    monkeypatch.setattr(fake_engine, "STEP_S", 0.0)


@pytest.fixture(params=[False, True], ids=["in turn", "overlapping"])
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a step is started before the result of the one before is taken."""
    monkeypatch.setattr(fake_engine, "ASYNC_SCHEDULING", request.param)
    return request.param


def make_core(config: EngineConfig | None = None) -> EngineCore:
    return EngineCore(config or fake_engine.fake_config(), load_plugins(quiet=True))


def request(request_id: str, prompt: list[int], max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, params=SamplingParams(), max_tokens=max_tokens
    )


def run(core: EngineCore, limit: int = 500) -> dict[str, list[EngineOutput]]:
    found: dict[str, list[EngineOutput]] = {}
    while core.has_work():
        for output in core.step():
            found.setdefault(output.request_id, []).append(output)
        limit -= 1
        assert limit, "the core makes no end"
    return found


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def test_requests_run_to_their_end(overlaps: bool) -> None:
    core = make_core()
    prompts = {f"r{i}": [97 + i] * (3 + 5 * i) for i in range(6)}
    for request_id, prompt in prompts.items():
        core.add_request(request(request_id, prompt))
    found = run(core)
    for request_id, prompt in prompts.items():
        assert tokens(found[request_id]) == fake_engine.continuation(prompt, 5)
        assert found[request_id][-1].finish_reason == FinishReason.LENGTH
    stats = core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    assert stats.num_steps > 0
    assert set(core.timings) == {"weights", "kv cache", "warm-up"}


def test_a_request_that_breaks_the_step_fails_alone(overlaps: bool) -> None:
    core = make_core()
    prompts = {f"good{i}": [100 + i, 3, 4] for i in range(4)}
    for request_id, prompt in prompts.items():
        core.add_request(request(request_id, prompt, 12))
    early = core.step() + core.step()
    core.add_request(request("bad", [fake_engine.RAISES, 1]))
    found = run(core)
    assert [(o.finish_reason, o.new_token_ids) for o in found["bad"]] == [(FinishReason.ERROR, [])]
    assert "this request breaks the step" in (found["bad"][0].error or "")
    for request_id, prompt in prompts.items():
        before = [output for output in early if output.request_id == request_id]
        assert tokens(before + found[request_id]) == fake_engine.continuation(prompt, 12)
    assert core.stats().num_free_blocks == core.stats().num_blocks


def test_a_dead_worker_is_the_end(overlaps: bool) -> None:
    core = make_core()
    core.add_request(request("r", [fake_engine.LOSES_WORKER]))
    with pytest.raises(WorkerDiedError, match="rank 1 is gone"):
        core.step()


def test_an_interrupted_step_leaves_the_core_usable(overlaps: bool) -> None:
    core = make_core()
    core.add_request(request("first", [100, 1, 2]))
    executor = core._executor
    sample, executor.sample = executor.sample, interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        core.step()
    executor.sample = sample  # type: ignore[method-assign]
    core.abort(["first"])
    core.add_request(request("second", [101, 1, 2]))
    assert tokens(run(core)["second"]) == fake_engine.continuation([101, 1, 2], 5)
    assert core.stats().num_free_blocks == core.stats().num_blocks


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_result_that_is_lost_is_computed_again(overlaps: bool) -> None:
    core = make_core()
    prompts = {f"r{i}": [100 + i, 3, 4] for i in range(3)}
    for request_id, prompt in prompts.items():
        core.add_request(request(request_id, prompt, 8))
    early = core.step() + core.step()
    executor = core._executor
    sample = executor.sample

    class Lost(PendingStep):
        def result(self) -> StepResult:
            raise RuntimeError("the device forgot it")

    def sample_and_lose() -> PendingStep:
        executor.sample = sample  # type: ignore[method-assign]
        sample()
        return Lost()

    executor.sample = sample_and_lose  # type: ignore[method-assign]
    found = run(core)
    for request_id, prompt in prompts.items():
        before = [output for output in early if output.request_id == request_id]
        assert tokens(before + found[request_id]) == fake_engine.continuation(prompt, 8)
    assert core.stats().num_free_blocks == core.stats().num_blocks


def test_everything_is_dropped_while_a_step_is_in_flight() -> None:
    core = make_core(fake_engine.fake_config(async_scheduling=True))
    core.add_request(request("r", [100, 1, 2]))
    assert core.step() == []
    core.abort(["r"])
    assert core.has_work(), "the step's blocks are to come back"
    assert run(core) == {}
    assert core.stats().num_free_blocks == core.stats().num_blocks


def test_the_device_is_never_without_a_step() -> None:
    """A step is started before the result of the one before is asked for, and never two of them."""
    core = make_core(fake_engine.fake_config(async_scheduling=True))
    log: list[str] = []
    executor = core._executor
    execute, sample = executor.execute, executor.sample

    def logged_execute(plan: StepPlan) -> None:
        log.append(f"start {plan.step_id}")
        execute(plan)

    def logged_sample() -> PendingStep:
        pending = sample()

        class Logged(PendingStep):
            def result(self) -> StepResult:
                result = pending.result()
                log.append(f"take {result.step_id}")
                return result

        return Logged()

    executor.execute, executor.sample = logged_execute, logged_sample  # type: ignore[method-assign]
    core.add_request(request("r", [100, 1, 2], max_tokens=4))
    run(core)
    assert log == ["start 1", "start 2", "take 1", "start 3", "take 2", "start 4", "take 3", "take 4"]


def test_the_context_is_cut_to_what_the_pool_holds() -> None:
    core = make_core(fake_engine.fake_config(num_blocks=10, max_model_len=1000))
    assert core.config.model.max_model_len == 10 * fake_engine.BLOCK_SIZE
    assert core.num_blocks == 10
    core.add_request(request("r", [100] * 39, max_tokens=1))
    assert tokens(run(core)["r"]) == fake_engine.continuation([100] * 39, 1)
