"""Random schedules: arrivals, priorities, aborts, failing steps, tiny pools, shared prefixes, plans ahead of results.

Whatever happens, every plan must compute what it should (the simulated worker checks each slot that is read), every
answer must be the one that the request gets alone, every request must end, and everything must come back.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulated_engine import SimulatedEngine, SimulatedWorker

from inferplane.api.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from inferplane.config.engine import CacheConfig, SchedulerConfig
from inferplane.request import EngineRequest, FinishReason, SamplingParams
from inferplane.scheduler import RequestTooLargeError, Scheduler
from inferplane.scheduler.sequence import Sequence

MAX_MODEL_LEN = 60


def make_engine(
    block_sizes: list[int],
    num_blocks: int,
    limits: SchedulerConfig,
    enable_prefix_caching: bool,
    num_plans_ahead: int = 0,
) -> SimulatedEngine:
    groups = tuple(
        KVCacheGroup(
            (f"layer{index}",),
            FullAttentionSpec(block_size=size, num_kv_heads=1, head_dim=8, dtype="float32"),
        )
        for index, size in enumerate(block_sizes)
    )
    cache = CacheConfig(block_sizes[0], enable_prefix_caching=enable_prefix_caching)
    scheduler = Scheduler(limits, cache, MAX_MODEL_LEN, KVCacheConfig(num_blocks, groups))
    worker = SimulatedWorker(block_sizes, num_blocks, limits.max_num_seqs, limits.max_num_batched_tokens)
    return SimulatedEngine(scheduler, worker, num_plans_ahead)


def check_references(engine: SimulatedEngine) -> None:
    """Every reference of the pool belongs to a request that is in the batch, or in a step in flight."""
    scheduler = engine.scheduler
    scheduler._kv.pool.check()
    holders: set[Sequence] = set(scheduler._state.by_id.values())
    for step in scheduler._in_flight.values():
        holders.update(step)
    held = Counter(block_id for sequence in holders for ids in sequence.blocks.block_ids for block_id in ids)
    for block_id in range(scheduler._kv.num_blocks):
        assert scheduler._kv.pool.num_references(block_id) == held[block_id]


class ScheduleMachine(RuleBasedStateMachine):
    @initialize(
        block_sizes=st.sampled_from([[2], [4], [3], [2, 4]]),
        num_blocks=st.integers(4, 30),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([1, 2, 3, 5, 8, 12, 16, 24]),
        policy=st.sampled_from(["fcfs", "priority"]),
        enable_prefix_caching=st.booleans(),
        num_plans_ahead=st.integers(0, 2),
    )
    def start(
        self,
        block_sizes: list[int],
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str,
        enable_prefix_caching: bool,
        num_plans_ahead: int,
    ) -> None:
        limits = SchedulerConfig(max_num_seqs, max_num_batched_tokens, policy)
        self.engine = make_engine(block_sizes, num_blocks, limits, enable_prefix_caching, num_plans_ahead)
        self.num_requests = 0

    @rule(
        stem=st.sampled_from([[], [1] * 9, [1] * 9 + [2] * 8, [3] * 24]),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=8),
        max_tokens=st.sampled_from([0, 1, 2, 5, 10, 20, 30]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "salt"]),
        stop_token_ids=st.sampled_from([[], [], [3], [3, 9]]),
        min_tokens=st.integers(0, 3),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        num_siblings=st.integers(1, 4),
    )
    def add(self, stem: list[int], tail: list[int], num_siblings: int, **fields: Any) -> None:
        max_tokens, prompt = fields["max_tokens"], [*stem, *tail]
        for _ in range(num_siblings):
            self.num_requests += 1
            request = EngineRequest(
                request_id=str(self.num_requests),
                prompt_token_ids=prompt,
                params=SamplingParams(
                    max_tokens=max_tokens,
                    min_tokens=min(fields["min_tokens"], max_tokens),
                    stop_token_ids=fields["stop_token_ids"],
                    prompt_logprobs=fields["prompt_logprobs"],
                ),
                max_tokens=max_tokens,
                priority=fields["priority"],
                cache_salt=fields["salt"],
            )
            # The last output token is not run, so it needs no slot.
            num_slots = len(prompt) + max(max_tokens - 1, 0)
            worker = self.engine.worker
            num_blocks = sum(math.ceil(num_slots / block_size) for block_size in worker.block_sizes)
            if len(prompt) + max_tokens > MAX_MODEL_LEN or num_blocks > worker.num_blocks:
                with pytest.raises(RequestTooLargeError):
                    self.engine.add(request)
                return
            self.engine.add(request)

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps: int) -> None:
        scheduler = self.engine.scheduler
        for _ in range(num_steps):
            running = list(scheduler._state.running)
            oldest = running[0] if running else None
            is_alone = bool(scheduler._state.suspects)
            decoding = [
                seq.request_id for seq in running if len(seq.token_ids) - seq.num_dispatched_tokens == 1
            ]
            num_preempted, num_in_flight = scheduler.stats().num_preemptions, len(self.engine.in_flight)
            plan = self.engine.step()
            if is_alone:
                assert plan is None or len(plan.num_scheduled_tokens) == 1
                continue
            if plan is not None and oldest is not None and num_in_flight == 0:
                assert oldest.request_id in plan.num_scheduled_tokens
            if plan is not None and scheduler.stats().num_preemptions == num_preempted:
                missing = [name for name in decoding if name not in plan.num_scheduled_tokens]
                # A step that was short of blocks admits nobody.
                assert not missing or not plan.new_requests

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = list(self.engine.scheduler._state.by_id)
        if live:
            self.engine.abort(data.draw(st.sampled_from(live)))

    @rule(kind=st.sampled_from(["break", "break", "mend", "reset"]), data=st.data())
    def disturb(self, kind: str, data: st.DataObject) -> None:
        """A request breaks every step that runs one of its positions; none does; or the cache is reset."""
        live = list(self.engine.scheduler._state.by_id)
        if kind == "reset":
            self.engine.scheduler.reset_prefix_cache()
        elif kind == "break" and live:
            name, position = data.draw(st.sampled_from(live)), data.draw(st.integers(0, 40))
            self.engine.worker.fails_for = lambda request_id, start, end: (
                request_id == name and start <= position < end
            )
        else:
            self.engine.worker.fails_for = lambda request_id, start, end: False

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "engine"):
            check_references(self.engine)
            stats = self.engine.scheduler.stats()
            assert stats.num_running + stats.num_waiting == len(self.engine.scheduler._state.by_id)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run(max_steps=5_000)
        check_references(self.engine)
        stats = self.engine.scheduler.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert sum(stats.num_finished.values()) == len(self.engine.requests)
        for name in self.engine.requests:
            assert self.engine.finish_reason(name) is not None
            self.engine.check_answer(name)
            self.check_prompt_logprobs(name)

    def check_prompt_logprobs(self, name: str) -> None:
        request, outputs = self.engine.requests[name], self.engine.outputs[name]
        whole = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        if request.params.prompt_logprobs is None:
            assert not whole
        elif self.engine.finish_reason(name) in (FinishReason.LENGTH, FinishReason.STOP):
            (entries,) = whole
            assert entries[0] is None
            chosen = [entry.chosen.token_id for entry in entries if entry is not None]
            assert chosen == request.prompt_token_ids[1:]


TestSchedules = ScheduleMachine.TestCase
TestSchedules.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_same_arrivals_give_the_same_plans(policy: str) -> None:
    def run() -> list[bytes]:
        draws = random.Random(5)
        engine = make_engine([4], 24, SchedulerConfig(6, 16, policy), enable_prefix_caching=True)
        for number in range(60):
            prompt = [1] * draws.randrange(9) + draws.choices(range(4), k=draws.randrange(1, 12))
            max_tokens = draws.randrange(1, 12)
            engine.add(
                EngineRequest(
                    request_id=str(number),
                    prompt_token_ids=prompt,
                    params=SamplingParams(max_tokens=max_tokens),
                    max_tokens=max_tokens,
                    priority=draws.randrange(3),
                )
            )
            engine.step()
            if number % 7 == 0:
                engine.abort(str(draws.randrange(number + 1)))
        engine.run()
        return [msgspec.msgpack.encode(plan) for plan in engine.plans]

    assert run() == run()
