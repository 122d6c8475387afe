"""Random schedules: arrivals, priorities, aborts, failing steps, tiny pools, shared prefixes, plans ahead of results.

Whatever happens, every plan must compute what it should (the simulated worker checks each slot that is read), every
answer must be the one that the request gets alone, every request must end, and everything must come back.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inferplane.api.kv import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    StateSpec,
)
from inferplane.config.engine import CacheConfig, SchedulerConfig
from inferplane.request import EngineRequest, FinishReason, SamplingParams
from inferplane.scheduler import RequestTooLargeError, Scheduler
from inferplane.scheduler.sequence import Sequence
from simulated_engine import SimulatedEngine, SimulatedWorker

MAX_MODEL_LEN = 60


def full(block_size: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_dim=8, dtype="float32")


def sliding(block_size: int, window: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_dim=8, dtype="float32", window=window
    )


def chunked(block_size: int, chunk: int) -> KVCacheSpec:
    return ChunkedLocalSpec(block_size=block_size, num_kv_heads=1, head_dim=8, dtype="float32", chunk=chunk)


def state(block_size: int) -> KVCacheSpec:
    return MambaSpec(block_size=block_size, shapes=((4,),), dtypes=("float32",))


MIXES: list[list[KVCacheSpec]] = [
    [full(2)],
    [full(4)],
    [full(3)],
    [full(2), full(4)],
    [sliding(2, 5)],
    [full(2), sliding(2, 7)],
    [sliding(4, 1), full(4), sliding(4, 9)],
    [chunked(2, 6), full(2)],
    [full(2), state(8)],
    [state(5)],
    [full(4), sliding(2, 6), state(6), chunked(4, 8)],
]
"""Groups of one model: alike, different in reach, in block size, in kind."""


def make_engine(
    mix: list[KVCacheSpec],
    num_blocks: int,
    limits: SchedulerConfig,
    enable_prefix_caching: bool,
    num_plans_ahead: int = 0,
) -> SimulatedEngine:
    """States have a pool of their own, half as large."""
    has_tokens = any(not isinstance(spec, StateSpec) for spec in mix)
    groups = tuple(
        KVCacheGroup((f"layer{index}",), spec, int(has_tokens and isinstance(spec, StateSpec)))
        for index, spec in enumerate(mix)
    )
    more = ((num_blocks + 1) // 2,) * max(group.pool for group in groups)
    cache = CacheConfig(mix[0].block_size, enable_prefix_caching=enable_prefix_caching)
    kv_config = KVCacheConfig(num_blocks, groups, more)
    scheduler = Scheduler(limits, cache, MAX_MODEL_LEN, kv_config)
    worker = SimulatedWorker(kv_config, limits.max_num_seqs, limits.max_num_batched_tokens)
    return SimulatedEngine(scheduler, worker, num_plans_ahead)


def check_references(engine: SimulatedEngine) -> None:
    """Every reference of the pool belongs to a request that is in the batch, or in a step in flight."""
    scheduler = engine.scheduler
    holders: set[Sequence] = set(scheduler._state.by_id.values())
    for step in scheduler._in_flight.values():
        holders.update(step)
    groups = engine.worker.kv_config.groups
    for number, pool in enumerate(scheduler._kv.pools):
        pool.check()
        held = Counter(
            block_id
            for sequence in holders
            for group, blocks in zip(groups, sequence.blocks.groups, strict=True)
            if group.pool == number
            for block_id in blocks.held
        )
        for block_id in range(pool.num_blocks):
            assert pool.num_references(block_id) == held[block_id]


def check_end(engine: SimulatedEngine) -> None:
    """All that was ever taken has ended, rightly, and is returned."""
    check_references(engine)
    stats = engine.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert sum(stats.num_finished.values()) == len(engine.requests)
    for name in engine.requests:
        assert engine.finish_reason(name) is not None
        engine.check_answer(name)
        check_prompt_logprobs(engine, name)


def check_prompt_logprobs(engine: SimulatedEngine, name: str) -> None:
    request = engine.requests[name]
    whole = [output.prompt_logprobs for output in engine.outputs[name] if output.prompt_logprobs is not None]
    if request.params.prompt_logprobs is None:
        assert not whole
    elif engine.finish_reason(name) in (FinishReason.LENGTH, FinishReason.STOP):
        (entries,) = whole
        assert entries[0] is None
        assert [entry.chosen.token_id for entry in entries if entry is not None] == request.prompt_token_ids[
            1:
        ]


def break_at(engine: SimulatedEngine, name: str, position: int) -> None:
    """From now on one request breaks every step that runs this position of it."""
    engine.worker.fails_for = lambda request_id, start, end: request_id == name and start <= position < end


def fits(worker: SimulatedWorker, num_tokens: int) -> bool:
    """Whether the pools hold one request of this many tokens."""
    needed = Counter[int]()
    for group in worker.kv_config.groups:
        needed[group.pool] += group.spec.max_num_blocks(num_tokens, worker.max_num_tokens)
    return all(needed[pool] <= num for pool, num in enumerate(worker.kv_config.pool_blocks))


class ScheduleMachine(RuleBasedStateMachine):
    @initialize(
        mix=st.sampled_from(MIXES),
        num_blocks=st.integers(4, 30),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([1, 2, 3, 5, 8, 12, 16, 24]),
        policy=st.sampled_from(["fcfs", "priority"]),
        enable_prefix_caching=st.booleans(),
        num_plans_ahead=st.integers(0, 2),
        async_scheduling=st.booleans(),
    )
    def start(
        self,
        mix: list[KVCacheSpec],
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str,
        enable_prefix_caching: bool,
        num_plans_ahead: int,
        async_scheduling: bool,
    ) -> None:
        limits = SchedulerConfig(
            max_num_seqs, max_num_batched_tokens, policy, async_scheduling=async_scheduling
        )
        self.engine = make_engine(mix, num_blocks, limits, enable_prefix_caching, num_plans_ahead)
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
        frequency_penalty=st.sampled_from([0.0, 0.0, 1.0]),
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
                    frequency_penalty=fields["frequency_penalty"],
                ),
                max_tokens=max_tokens,
                priority=fields["priority"],
                cache_salt=fields["salt"],
            )
            # The last output token is not run, so it needs no slot.
            num_slots = len(prompt) + max(max_tokens - 1, 0)
            worker = self.engine.worker
            if len(prompt) + max_tokens > MAX_MODEL_LEN or not fits(worker, num_slots):
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

    @rule(kind=st.sampled_from(["break", "break", "mend", "reset", "lose"]), data=st.data())
    def disturb(self, kind: str, data: st.DataObject) -> None:
        """A request breaks every step that runs one of its positions; none does; the cache is reset; or a step fails
        when its result is asked for."""
        live = list(self.engine.scheduler._state.by_id)
        if kind == "reset":
            self.engine.scheduler.reset_prefix_cache()
        elif kind == "lose":
            lost = data.draw(st.integers(1, 200))
            self.engine.loses_result = lambda plan: plan.step_id == lost
        elif kind == "break" and live:
            break_at(self.engine, data.draw(st.sampled_from(live)), data.draw(st.integers(0, 40)))
        else:
            self.engine.worker.fails_for = lambda request_id, start, end: False

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "engine"):
            check_references(self.engine)
            stats = self.engine.scheduler.stats()
            assert stats.num_running + stats.num_waiting == len(self.engine.scheduler._state.by_id)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run(max_steps=5_000)
            check_end(self.engine)


TestSchedules = ScheduleMachine.TestCase
TestSchedules.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def random_request(draws: random.Random, request_id: str, max_tokens_in_all: int) -> EngineRequest:
    """One that takes from a tenth to all of what a request may."""
    num_tokens = draws.randint(max(2, max_tokens_in_all // 10), max_tokens_in_all)
    num_prompt = draws.randint(1, num_tokens - 1)
    max_tokens = num_tokens - num_prompt
    stem = draws.choice([[1] * 60, [1] * 60, [1] * 9 + [2] * 60])
    num_stem = draws.choice([0, num_prompt // 2, num_prompt])
    tail = draws.choices(range(3), k=num_tokens)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[*stem[:num_stem], *tail][:num_prompt],
        params=SamplingParams(max_tokens=max_tokens, prompt_logprobs=draws.choice([None, None, None, 0])),
        max_tokens=max_tokens,
        priority=draws.randrange(3),
        cache_salt=draws.choice([None] * 5 + ["salt"]),
    )


def run_crowded_schedule(seed: int) -> SimulatedEngine:
    """Many requests in a pool that holds a few of them; every other thing that can happen, now and then."""
    draws = random.Random(seed)
    mix = draws.choice(MIXES)
    limits = SchedulerConfig(
        draws.randint(2, 6),
        draws.randint(2, 16),
        draws.choice(["fcfs", "priority"]),
        async_scheduling=draws.random() < 0.6,
    )
    num_blocks = draws.randint(8, 16) * len(mix)
    engine = make_engine(mix, num_blocks, limits, draws.random() < 0.7, draws.choice([0, 0, 1, 2]))
    break_rate, abort_rate, reset_rate = draws.choice(
        [(0, 0, 0), (0.1, 0, 0), (0, 0.1, 0), (0, 0, 0.1), (0.05, 0.05, 0.05)]
    )
    if draws.random() < 0.1:
        lost_step = draws.randrange(200)
        engine.loses_result = lambda plan: plan.step_id == lost_step
    for number in range(25):
        request = random_request(draws, str(number), engine.scheduler.max_request_tokens)
        engine.add(request)
        for _ in range(draws.choice([0, 1, 2, 8])):
            engine.step()
            check_references(engine)
        live = list(engine.scheduler._state.by_id)
        if live and draws.random() < abort_rate:
            engine.abort(draws.choice(live))
        if draws.random() < reset_rate:
            engine.scheduler.reset_prefix_cache()
        if live and draws.random() < break_rate:
            break_at(engine, draws.choice(live), draws.randrange(len(request.prompt_token_ids) + 4))
    engine.run(max_steps=5_000)
    return engine


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 2**32 - 1))
def test_crowded_schedules(seed: int) -> None:
    check_end(run_crowded_schedule(seed))


def test_crowded_schedules_reach_what_they_are_for() -> None:
    engines = [run_crowded_schedule(seed) for seed in range(10)]
    stats = [engine.scheduler.stats() for engine in engines]
    assert sum(figures.num_preemptions for figures in stats) > 25
    assert sum(figures.num_prefix_hit_tokens for figures in stats) > 25
    assert sum(figures.num_finished.get("error", 0) for figures in stats) > 0
    assert sum(figures.num_finished.get("abort", 0) for figures in stats) > 0


MANY = 10_000
"""Short schedules over mixed groups, in parts that a quick run takes one of."""
PARTS = 20


def run_short_schedule(seed: int) -> SimulatedEngine:
    """A few requests that share prompts, in a pool that holds one or two of them."""
    draws = random.Random(seed)
    mix = draws.choice(MIXES[3:])
    limits = SchedulerConfig(draws.randint(2, 4), draws.choice([3, 6, 12]))
    engine = make_engine(mix, 6 * len(mix), limits, draws.random() < 0.9, draws.choice([0, 0, 1]))
    longest = min(28, engine.scheduler.max_request_tokens)
    for number in range(4):
        engine.add(random_request(draws, str(number), longest))
        for _ in range(draws.choice([0, 1, 4])):
            engine.step()
        live = list(engine.scheduler._state.by_id)
        if live and draws.random() < 0.1:
            engine.abort(draws.choice(live))
        if draws.random() < 0.05:
            engine.scheduler.reset_prefix_cache()
        if live and draws.random() < 0.05:
            break_at(engine, draws.choice(live), draws.randrange(12))
        check_references(engine)
    engine.run(max_steps=1_000)
    return engine


@pytest.mark.parametrize("part", range(PARTS))
def test_ten_thousand_short_schedules(part: int) -> None:
    for seed in range(part * MANY // PARTS, (part + 1) * MANY // PARTS):
        try:
            check_end(run_short_schedule(seed))
        except Exception as error:
            error.add_note(f"in run_short_schedule({seed})")
            raise


def test_short_schedules_reach_what_they_are_for() -> None:
    stats = [run_short_schedule(seed).scheduler.stats() for seed in range(200)]
    assert sum(figures.num_preemptions for figures in stats) > 25
    assert sum(figures.num_prefix_hit_tokens for figures in stats) > 50
    assert sum(figures.num_finished.get("abort", 0) for figures in stats) > 20


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_same_arrivals_give_the_same_plans(policy: str) -> None:
    def run() -> list[bytes]:
        draws = random.Random(5)
        engine = make_engine([full(4)], 24, SchedulerConfig(6, 16, policy), enable_prefix_caching=True)
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


class TestAsyncScheduling:
    """One plan ahead of the results, as the engine's loop goes."""

    def engine(self, num_blocks: int = 40, **limits: Any) -> SimulatedEngine:
        config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, **limits})
        return make_engine([full(4)], num_blocks, config, enable_prefix_caching=True, num_plans_ahead=1)

    def request(self, name: str, prompt: list[int], max_tokens: int, **params: Any) -> EngineRequest:
        return EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, **params),
            max_tokens=max_tokens,
        )

    @pytest.mark.parametrize(("async_scheduling", "num_waits"), [(False, 9), (True, 0)])
    def test_whether_a_plan_waits_for_the_result_before_it(self, async_scheduling: bool, num_waits: int):
        engine = self.engine(async_scheduling=async_scheduling)
        for name in "ab":
            engine.add(self.request(name, [1, 2, 3], max_tokens=10))
        plans = [engine.step() for _ in range(10 + num_waits)]
        engine.flush()
        check_end(engine)
        assert sum(plan is None for plan in plans) == num_waits

    def test_the_last_token_is_not_run_and_a_late_stop_costs_one_step(self):
        engine = self.engine(async_scheduling=True)
        engine.add(self.request("a", [1, 2, 3], max_tokens=6))
        engine.run()
        assert [plan.num_tokens for plan in engine.plans] == [3, 1, 1, 1, 1, 1]
        output = engine.tokens("a")
        stop = self.engine(async_scheduling=True)
        first = next(index for index, token in enumerate(output) if token not in output[:index] and index)
        stop.add(self.request("a", [1, 2, 3], max_tokens=6, stop_token_ids=[output[first]], seed=None))
        stop.run()
        assert stop.tokens("a") == output[: first + 1]
        assert stop.finish_reason("a") is FinishReason.STOP
        assert len(stop.plans) == first + 2
        check_end(stop)

    @pytest.mark.parametrize(
        ("bad_words", "params", "waits"),
        [
            ([[7], [8, 9]], {}, True),
            ([], {"logits_processors": {"any": None}}, True),
            ([[7], [8]], {}, False),
            ([], {"frequency_penalty": 1.0}, False),
            ([], {"repetition_penalty": 1.1}, False),
            ([], {"presence_penalty": -1.0, "min_tokens": 3, "logit_bias": {4: 1.0}}, False),
        ],
    )
    def test_only_a_request_whose_output_the_host_reads_waits_for_it(
        self, bad_words: list[list[int]], params: dict[str, Any], waits: bool
    ):
        engine = self.engine(async_scheduling=True)
        request = self.request("reads", [1, 2, 3], max_tokens=5, **params)
        engine.add(msgspec.structs.replace(request, bad_words_token_ids=bad_words))
        engine.add(self.request("other", [1, 2], max_tokens=9))
        planned = []
        while engine.scheduler.has_work():
            plan = engine.step()
            planned.append(sorted(plan.num_scheduled_tokens) if plan else [])
        engine.flush()
        check_end(engine)
        both = ["other", "reads"]
        assert planned[:6] == ([both, ["other"]] * 3 if waits else [both] * 5 + [["other"]])

    def test_the_pool_runs_out_with_every_request_in_flight(self):
        engine = self.engine(num_blocks=8, async_scheduling=True)
        for name in "abc":
            engine.add(self.request(name, [1, 2, int(name, 16)], max_tokens=20))
        engine.run()
        check_end(engine)
        assert engine.scheduler.stats().num_preemptions > 0
