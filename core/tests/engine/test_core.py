from __future__ import annotations

import pytest

import fake_engine
from inferplane.config import EngineConfig
from inferplane.engine import core as core_module
from inferplane.engine.core import EngineCore
from inferplane.executor import WorkerDiedError
from inferplane.plugins import load_plugins
from inferplane.request import EngineOutput, EngineRequest, FinishReason, SamplingParams


@pytest.fixture(autouse=True)
def fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "make_executor", fake_engine.FakeExecutor)
    monkeypatch.setattr(fake_engine, "STEP_S", 0.0)


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


def test_requests_run_to_their_end() -> None:
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


def test_a_request_that_breaks_the_step_fails_alone() -> None:
    core = make_core()
    prompts = {f"good{i}": [100 + i, 3, 4] for i in range(4)}
    for request_id, prompt in prompts.items():
        core.add_request(request(request_id, prompt, 12))
    core.step()
    core.step()
    core.add_request(request("bad", [fake_engine.RAISES, 1]))
    found = run(core)
    assert [(o.finish_reason, o.new_token_ids) for o in found["bad"]] == [(FinishReason.ERROR, [])]
    assert "this request breaks the step" in (found["bad"][0].error or "")
    for request_id, prompt in prompts.items():
        # the first two tokens came with the steps before
        assert tokens(found[request_id]) == fake_engine.continuation(prompt, 12)[2:]
    assert core.stats().num_free_blocks == core.stats().num_blocks


def test_a_dead_worker_is_the_end() -> None:
    core = make_core()
    core.add_request(request("r", [fake_engine.LOSES_WORKER]))
    with pytest.raises(WorkerDiedError, match="rank 1 is gone"):
        core.step()


def test_an_interrupted_step_leaves_the_core_usable() -> None:
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


def test_the_context_is_cut_to_what_the_pool_holds() -> None:
    core = make_core(fake_engine.fake_config(num_blocks=10, max_model_len=1000))
    assert core.config.model.max_model_len == 10 * fake_engine.BLOCK_SIZE
    assert core.num_blocks == 10
    core.add_request(request("r", [100] * 39, max_tokens=1))
    assert tokens(run(core)["r"]) == fake_engine.continuation([100] * 39, 1)
