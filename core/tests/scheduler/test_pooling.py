"""Requests that want a vector of their prompt, and prompts that cannot be cut."""

from __future__ import annotations

import random

import pytest

from inferplane.api.kv import EncoderAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroup
from inferplane.config.engine import CacheConfig, SchedulerConfig
from inferplane.engine.kv_grouping import group_layers
from inferplane.plan import StepPlan, StepResult
from inferplane.request import EngineOutput, EngineRequest, FinishReason, PoolingParams, SamplingParams
from inferplane.scheduler import RequestTooLargeError, Scheduler

BUDGET = 16
PARAMS = SamplingParams(max_tokens=0)


def make_scheduler(*, runs_whole: bool, max_num_seqs: int = 4) -> Scheduler:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    groups = () if runs_whole else (KVCacheGroup(("layer",), spec),)
    config = SchedulerConfig(max_num_seqs, BUDGET)
    return Scheduler(config, CacheConfig(4), 100, KVCacheConfig(32, groups), runs_whole=runs_whole)


def request(request_id: str, num_tokens: int) -> EngineRequest:
    token_ids = [hash(request_id) % 1000, *range(1, num_tokens)]
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        params=PARAMS,
        max_tokens=0,
        pooling=PoolingParams(),
    )


class Worker:
    """Answers a request with its length when all its tokens have run."""

    def __init__(self) -> None:
        self.num_left: dict[str, int] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.new_requests:
            assert new.pooling == PoolingParams()
            self.num_left[new.request_id] = len(new.token_ids) - new.num_computed_tokens
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self.num_left[request_id] -= num_tokens
        done = {name: name.encode() for name in plan.num_scheduled_tokens if self.num_left[name] == 0}
        return StepResult(step_id=plan.step_id, sampled_token_ids={}, pooled=done)


def run_to_the_end(scheduler: Scheduler) -> tuple[list[StepPlan], list[EngineOutput]]:
    worker, plans, outputs = Worker(), [], []
    while (plan := scheduler.schedule()) is not None:
        plans.append(plan)
        outputs += scheduler.update(plan, worker.run(plan))
    return plans, outputs


@pytest.mark.parametrize("runs_whole", [False, True])
def test_every_request_ends_with_its_vector(runs_whole: bool):
    rng = random.Random(0)
    scheduler = make_scheduler(runs_whole=runs_whole)
    lengths = {f"r{index}": rng.randint(1, BUDGET) for index in range(40)}
    for name, length in lengths.items():
        scheduler.add(request(name, length))
    plans, outputs = run_to_the_end(scheduler)
    assert {output.request_id: output.pooled for output in outputs} == {n: n.encode() for n in lengths}
    assert all(output.finish_reason is FinishReason.STOP and not output.new_token_ids for output in outputs)
    assert all(plan.num_tokens <= BUDGET for plan in plans)
    if runs_whole:
        assert all(lengths[name] == n for plan in plans for name, n in plan.num_scheduled_tokens.items())
        assert [output.request_id for output in outputs] == list(lengths)
    stats = scheduler.stats()
    assert stats.num_prompt_tokens == sum(lengths.values()) and stats.num_finished == {"stop": 40}
    assert stats.num_free_blocks == stats.num_blocks


def test_what_is_left_of_a_step_goes_to_prompts_that_fit():
    scheduler = make_scheduler(runs_whole=True)
    for name, length in {"a": 6, "b": 6, "c": 6, "d": 2}.items():
        scheduler.add(request(name, length))
    plans, _ = run_to_the_end(scheduler)
    assert [list(plan.num_scheduled_tokens) for plan in plans] == [["a", "b"], ["c", "d"]]


def test_a_prompt_longer_than_a_step_is_refused_where_it_cannot_be_cut():
    with pytest.raises(
        RequestTooLargeError, match=r"17 tokens does not fit in one step.* may have 16 tokens"
    ):
        make_scheduler(runs_whole=True).add(request("long", BUDGET + 1))
    make_scheduler(runs_whole=False).add(request("long", BUDGET + 1))


def test_a_step_that_raises_fails_the_one_at_fault():
    scheduler, worker = make_scheduler(runs_whole=True), Worker()
    for name in ("good", "bad", "late"):
        scheduler.add(request(name, 5))
    outputs: list[EngineOutput] = []
    while (plan := scheduler.schedule()) is not None:
        if "bad" in plan.num_scheduled_tokens:
            outputs += scheduler.fail_step(plan, "no")
        else:
            outputs += scheduler.update(plan, worker.run(plan))
    reasons = {output.request_id: output.finish_reason for output in outputs}
    assert reasons == {"good": FinishReason.STOP, "late": FinishReason.STOP, "bad": FinishReason.ERROR}


def test_a_vector_that_does_not_come_is_an_error_and_an_abort_ends_the_wait():
    scheduler = make_scheduler(runs_whole=True)
    scheduler.add(request("a", 3))
    scheduler.add(request("b", 3))
    plan = scheduler.schedule()
    assert plan is not None
    assert [output.finish_reason for output in scheduler.abort(["b"])] == [FinishReason.ABORT]
    [output] = scheduler.update(plan, StepResult(step_id=plan.step_id, sampled_token_ids={}))
    assert output.finish_reason is FinishReason.ERROR and "no vector" in (output.error or "")


def test_layers_without_a_cache_are_in_no_group():
    encoder, full = (
        EncoderAttentionSpec(window=3),
        FullAttentionSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="float32"),
    )
    assert encoder.sees_later_tokens and not full.sees_later_tokens
    assert (encoder.block_bytes, encoder.max_num_blocks(100, 10)) == (0, 0)
    assert group_layers({"a": encoder}, 100, 16) == ()
    assert group_layers({"a": encoder, "b": full}, 100, 16) == (KVCacheGroup(("b",), full),)
    with pytest.raises(ValueError, match="window must be at least 1"):
        EncoderAttentionSpec(window=0)
