"""The scheduler with a worker that verifies every plan, case by case. Random schedules are in `test_schedules.py`."""

from __future__ import annotations

from typing import Any

import pytest

from inferplane.api.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from inferplane.config.engine import CacheConfig, SchedulerConfig
from inferplane.plan import StepResult
from inferplane.request import EngineRequest, FinishReason, SamplingParams
from inferplane.scheduler import QueueFullError, RequestTooLargeError, Scheduler
from simulated_engine import SimulatedEngine, SimulatedWorker, logprobs_of, next_token, right_answer

BLOCK_SIZE = 4


def make_engine(
    num_blocks: int = 64,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    policy: str = "fcfs",
    policies: Any = None,
    max_num_waiting: int | None = None,
    max_model_len: int = 1000,
    enable_prefix_caching: bool = True,
    num_plans_ahead: int = 0,
    seed: int = 0,
) -> SimulatedEngine:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=8, dtype="float32")
    kv_config = KVCacheConfig(num_blocks, (KVCacheGroup(("layer",), spec),))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs, max_num_batched_tokens, policy, max_num_waiting),
        CacheConfig(BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching),
        max_model_len,
        kv_config,
        seed=seed,
        policies=policies,
    )
    worker = SimulatedWorker(kv_config, max_num_seqs, max_num_batched_tokens)
    return SimulatedEngine(scheduler, worker, num_plans_ahead)


def make_request(
    request_id: str, prompt: list[int] | int, max_tokens: int = 4, **fields: Any
) -> EngineRequest:
    """A prompt given as a length has tokens that no other prompt begins with."""
    if isinstance(prompt, int):
        prompt = [hash(request_id) % 100_000, *range(1, prompt)]
    engine_fields = {
        name: fields.pop(name) for name in ("eos_token_ids", "priority", "cache_salt") if name in fields
    }
    params = SamplingParams(max_tokens=max_tokens, **{"seed": 1, **fields})
    return EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, params=params, max_tokens=max_tokens, **engine_fields
    )


def check_all_returned(engine: SimulatedEngine) -> None:
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.kv_usage == 0.0
    assert not engine.scheduler.has_work()
    assert engine.scheduler.schedule() is None
    engine.scheduler._kv.pools[0].check()


class TestLimits:
    def test_a_request_that_can_never_fit_is_refused_with_the_numbers(self) -> None:
        engine = make_engine(49, max_model_len=4096)
        with pytest.raises(
            RequestTooLargeError, match=r"1000 tokens.* 250 KV blocks.* 49 in all"
        ) as prompt_error:
            engine.add(make_request("a", 1000, 1))
        assert prompt_error.value.param == "prompt"
        with pytest.raises(
            RequestTooLargeError, match=r"prompt of 20 .*max_tokens of 178 need 50"
        ) as tokens_error:
            engine.add(make_request("a", 20, 178))
        assert tokens_error.value.param == "max_tokens"
        check_all_returned(engine)

    def test_the_largest_request_that_fits_runs_to_its_end(self) -> None:
        engine = make_engine(49, max_model_len=4096)
        assert engine.scheduler.max_request_tokens == 49 * BLOCK_SIZE + 1
        engine.add(make_request("a", 20, 177))
        engine.run()
        engine.check_answer("a")
        assert len(engine.tokens("a")) == 177
        check_all_returned(engine)

    def test_impossible_requests_do_not_hold_up_the_others(self) -> None:
        engine = make_engine(49, max_model_len=4096)
        for number in range(5):
            with pytest.raises(RequestTooLargeError):
                engine.add(make_request(f"long-{number}", 1000))
            engine.add(make_request(f"short-{number}", 10))
        engine.run(max_steps=20)
        for number in range(5):
            engine.check_answer(f"short-{number}")

    def test_the_context_is_a_limit(self) -> None:
        engine = make_engine(max_model_len=20)
        assert engine.scheduler.max_request_tokens == 20
        with pytest.raises(RequestTooLargeError, match=r"make 21, but the context holds 20 tokens"):
            engine.add(make_request("a", 16, 5))
        engine.add(make_request("a", 16, 4))

    def test_empty_prompts_and_ids_in_use_are_refused(self) -> None:
        engine = make_engine()
        with pytest.raises(ValueError, match="no prompt tokens"):
            engine.add(make_request("a", []))
        engine.add(make_request("a", 3))
        with pytest.raises(ValueError, match="'a' is in use"):
            engine.add(make_request("a", 3))

    def test_a_full_queue_turns_away_and_takes_again(self) -> None:
        engine = make_engine(max_num_seqs=2, max_num_waiting=3)
        for number in range(5):
            engine.add(make_request(str(number), 3))
        with pytest.raises(QueueFullError, match="max_num_waiting is 3"):
            engine.add(make_request("late", 3))
        engine.run()
        engine.add(make_request("late", 3))
        engine.run()
        engine.check_answer("late")

    def test_settings_that_cannot_work_are_refused(self) -> None:
        with pytest.raises(ValueError, match="'lifo' is unknown; there are fcfs, priority"):
            make_engine(policy="lifo")
        with pytest.raises(ValueError, match="max_num_seqs must be at least 1, got 0"):
            make_engine(max_num_seqs=0)

    def test_a_burst_far_beyond_max_num_seqs_is_queued_and_all_finish(self) -> None:
        engine = make_engine()
        for number in range(300):
            engine.add(make_request(str(number), 3 + number % 5))
        assert engine.scheduler.stats().num_waiting == 300
        engine.run()
        for number in range(300):
            engine.check_answer(str(number))
        check_all_returned(engine)

    def test_more_requests_than_the_budget_has_tokens(self) -> None:
        engine = make_engine(max_num_seqs=16, max_num_batched_tokens=3)
        for number in range(16):
            engine.add(make_request(str(number), 5))
        while engine.scheduler.has_work():
            running = list(engine.scheduler._state.running)
            plan = engine.step()
            assert plan is not None and all(seq.request_id in plan.num_scheduled_tokens for seq in running)
        for number in range(16):
            engine.check_answer(str(number))


class TestEnds:
    def test_a_stop_token_is_kept_and_named(self) -> None:
        request = make_request("a", 5, 50, stop_token_ids=[3], eos_token_ids=[7])
        output, _ = right_answer(request, 1)
        engine = make_engine()
        engine.add(request)
        engine.run()
        assert engine.tokens("a") == output
        assert engine.outputs["a"][-1].finish_reason is FinishReason.STOP
        assert engine.outputs["a"][-1].stop_token_id == output[-1]
        assert output[-1] in (3, 7)

    def test_eos_ends_unless_it_is_ignored(self) -> None:
        everything = list(range(16))
        engine = make_engine()
        engine.add(make_request("a", 5, 6, eos_token_ids=everything))
        engine.add(make_request("b", 5, 6, eos_token_ids=everything, ignore_eos=True))
        engine.run()
        assert (len(engine.tokens("a")), engine.finish_reason("a")) == (1, FinishReason.STOP)
        assert (len(engine.tokens("b")), engine.finish_reason("b")) == (6, FinishReason.LENGTH)
        assert engine.outputs["b"][-1].stop_token_id is None

    def test_no_stop_token_counts_before_min_tokens(self) -> None:
        engine = make_engine()
        engine.add(make_request("a", 5, 9, stop_token_ids=list(range(16)), min_tokens=4))
        engine.run()
        assert len(engine.tokens("a")) == 5

    def test_max_tokens_zero_scores_the_prompt_and_ends(self) -> None:
        engine = make_engine(max_num_batched_tokens=4)
        prompt = [9, 8, 7, 6, 5, 4, 3, 2, 1]
        engine.add(make_request("a", prompt, 0, prompt_logprobs=0))
        engine.run()
        (output,) = engine.outputs["a"]
        assert output.new_token_ids == []
        assert output.finish_reason is FinishReason.LENGTH
        assert output.prompt_logprobs == [None, *(logprobs_of(pos, prompt[pos]) for pos in range(1, 9))]
        check_all_returned(engine)

    def test_logprobs_follow_the_tokens(self) -> None:
        engine = make_engine()
        engine.add(make_request("a", 5, 3, logprobs=0))
        engine.add(make_request("b", 5, 3))
        engine.run()
        found = [entry for output in engine.outputs["a"] for entry in output.logprobs or []]
        assert found == [logprobs_of(5 + index, token) for index, token in enumerate(engine.tokens("a"))]
        assert all(output.logprobs is None for output in engine.outputs["b"])

    def test_several_tokens_of_one_step_are_cut_at_the_stop(self) -> None:
        engine = make_engine()
        engine.add(make_request("a", [1, 2], 9, stop_token_ids=[5], logprobs=0))
        plan = engine.scheduler.schedule()
        assert plan is not None
        logprobs = [logprobs_of(position, 0) for position in range(4)]
        result = StepResult(
            step_id=plan.step_id, sampled_token_ids={"a": [3, 4, 5, 6]}, logprobs={"a": logprobs}
        )
        (output,) = engine.scheduler.update(plan, result)
        assert output.new_token_ids == [3, 4, 5]
        assert output.logprobs == logprobs[:3]
        assert output.stop_token_id == 5
        assert engine.scheduler.stats().num_generated_tokens == 3

    def test_an_error_of_one_request_ends_that_one_only(self) -> None:
        engine = make_engine()
        engine.add(make_request("good", 5))
        engine.add(make_request("bad", 5))
        engine.worker.errors_for = lambda request_id: "its processor raised" if request_id == "bad" else None
        engine.run()
        engine.check_answer("good")
        assert engine.outputs["bad"][-1].finish_reason is FinishReason.ERROR
        assert engine.outputs["bad"][-1].error == "its processor raised"
        check_all_returned(engine)

    def test_a_worker_that_forgets_a_token_fails_the_request_and_hangs_nobody(self) -> None:
        engine = make_engine()
        engine.add(make_request("a", 3))
        plan = engine.scheduler.schedule()
        assert plan is not None
        (output,) = engine.scheduler.update(plan, StepResult(step_id=plan.step_id, sampled_token_ids={}))
        assert output.finish_reason is FinishReason.ERROR
        check_all_returned(engine)

    def test_missing_prompt_logprobs_fail_the_request(self) -> None:
        engine = make_engine()
        engine.add(make_request("a", 3, prompt_logprobs=1))
        plan = engine.scheduler.schedule()
        assert plan is not None
        (output,) = engine.scheduler.update(
            plan, StepResult(step_id=plan.step_id, sampled_token_ids={"a": [1]})
        )
        assert output.finish_reason is FinishReason.ERROR
        assert output.error is not None and "0 prompt log-probabilities for 3" in output.error

    def test_results_are_taken_once_and_for_their_own_plan(self) -> None:
        engine = make_engine()
        engine.add(make_request("a", 3))
        plan = engine.scheduler.schedule()
        assert plan is not None
        with pytest.raises(ValueError, match="result is of step 7, but the plan is step 1"):
            engine.scheduler.update(plan, StepResult(step_id=7, sampled_token_ids={}))
        result = StepResult(step_id=1, sampled_token_ids={"a": [1]})
        engine.scheduler.update(plan, result)
        with pytest.raises(ValueError, match="not in flight"):
            engine.scheduler.update(plan, result)


class TestSeeds:
    def test_requests_without_a_seed_draw_theirs_from_the_engines(self) -> None:
        seeds = []
        for engine_seed in (5, 5, 6):
            engine = make_engine(seed=engine_seed)
            engine.add(make_request("a", 3, seed=None))
            engine.add(make_request("b", 3, seed=None))
            engine.add(make_request("c", 3, seed=-4))
            engine.run()
            seeds.append(dict(engine.seeds))
        assert seeds[0] == seeds[1]
        assert seeds[0]["a"] != seeds[0]["b"]
        assert seeds[0]["a"] != seeds[2]["a"]
        assert seeds[0]["c"] == -4

    def test_a_preempted_request_keeps_its_seed(self) -> None:
        engine = make_engine(8)
        for name in ("a", "b"):
            engine.add(make_request(name, 8, 20, seed=None))
        engine.run()
        assert engine.scheduler.stats().num_preemptions > 0
        sent = [(new.request_id, new.seed) for plan in engine.plans for new in plan.new_requests]
        assert len(sent) > 2
        assert len(set(sent)) == 2


class TestPrefixCache:
    @pytest.mark.parametrize("num_tokens", [15, 16, 17])
    def test_cold_warm_and_off_give_the_same_tokens(self, num_tokens: int) -> None:
        prompt = list(range(num_tokens))
        answers = []
        for enable_prefix_caching in (True, False):
            engine = make_engine(enable_prefix_caching=enable_prefix_caching)
            for name in ("first", "second", "third"):
                engine.add(make_request(name, prompt, 8))
                engine.run()
                engine.check_answer(name)
                answers.append(engine.tokens(name))
            cached = [engine.outputs[name][-1].num_cached_tokens for name in ("first", "second", "third")]
            reusable = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert cached == ([0, reusable, reusable] if enable_prefix_caching else [0, 0, 0])
            engine.add(make_request("tail", [*prompt[:9], 7, 7, 7], 8))
            engine.run()
            engine.check_answer("tail")
            assert engine.outputs["tail"][0].num_cached_tokens == (8 if enable_prefix_caching else 0)
        assert all(answer == answers[0] for answer in answers)

    def test_outputs_are_part_of_the_cache(self) -> None:
        engine = make_engine()
        engine.add(make_request("first", list(range(6)), 8))
        engine.run()
        conversation = [*range(6), *engine.tokens("first"), 1, 2]
        engine.add(make_request("second", conversation))
        engine.run()
        assert engine.outputs["second"][0].num_cached_tokens == 12
        engine.check_answer("second")

    def test_salts_keep_requests_apart(self) -> None:
        engine = make_engine()
        for name, salt in (("first", "mine"), ("second", "yours"), ("third", None), ("fourth", "mine")):
            engine.add(make_request(name, list(range(20)), cache_salt=salt))
            engine.run()
        cached = [
            engine.outputs[name][0].num_cached_tokens for name in ("first", "second", "third", "fourth")
        ]
        assert cached == [0, 0, 0, 16]

    def test_prompt_logprobs_need_every_position_and_still_fill_the_cache(self) -> None:
        engine = make_engine()
        for name in ("first", "second"):
            engine.add(make_request(name, list(range(20)), prompt_logprobs=1))
            engine.run()
            assert engine.outputs[name][0].num_cached_tokens == 0
            assert len(engine.outputs[name][0].prompt_logprobs or []) == 20
        engine.add(make_request("third", list(range(20))))
        engine.run()
        assert engine.outputs["third"][0].num_cached_tokens == 16

    @pytest.mark.parametrize("num_plans_ahead", [0, 1])
    def test_a_prompt_that_many_send_at_once_is_computed_once(self, num_plans_ahead: int) -> None:
        engine = make_engine(200, max_num_batched_tokens=16, num_plans_ahead=num_plans_ahead)
        for number in range(8):
            engine.add(make_request(f"sibling-{number}", list(range(50)), 3, seed=number))
        engine.add(make_request("other", 5, 3))
        num_steps = 0
        while not engine.tokens("other"):
            num_steps += 1
            engine.step()
        assert num_steps <= 2 + num_plans_ahead, "one that shares nothing is not held up"
        engine.run()
        # The first computes 50 tokens, each other one the two after the last full block; then two outputs each.
        assert sum(plan.num_tokens for plan in engine.plans) == 50 + 7 * 2 + 8 * 2 + (5 + 2)
        assert [engine.outputs[f"sibling-{number}"][0].num_cached_tokens for number in range(8)] == [
            0
        ] + 7 * [48]
        for name in engine.requests:
            engine.check_answer(name)

    def test_who_waits_for_a_shared_prompt_goes_on_when_its_owner_leaves(self) -> None:
        engine = make_engine(200, max_num_batched_tokens=16)
        for number in range(3):
            engine.add(make_request(str(number), list(range(50)), 3))
        engine.step()
        assert engine.scheduler.stats().num_waiting == 2
        engine.abort("0")
        engine.run()
        engine.check_answer("1")
        engine.check_answer("2")

    def test_counters(self) -> None:
        engine = make_engine()
        for name in ("first", "second"):
            engine.add(make_request(name, list(range(20)), 3))
            engine.run()
        stats = engine.scheduler.stats()
        assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (40, 16)
        assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (40, 6)
        assert stats.num_finished == {"length": 2}

    def test_reset_forgets(self) -> None:
        engine = make_engine()
        for name in ("first", "second"):
            engine.add(make_request(name, list(range(20))))
            engine.run()
            engine.scheduler.reset_prefix_cache()
        assert engine.outputs["second"][0].num_cached_tokens == 0


class TestOrder:
    def test_priority_runs_the_lower_number_first_and_equals_by_arrival(self) -> None:
        engine = make_engine(max_num_seqs=1, policy="priority")
        for name, priority in (("c", 5), ("d", 5), ("a", -1), ("b", 0)):
            engine.add(make_request(name, 3, priority=priority))
        engine.run()
        assert [new.request_id for plan in engine.plans for new in plan.new_requests] == ["a", "b", "c", "d"]

    def test_fcfs_ignores_priority(self) -> None:
        engine = make_engine(max_num_seqs=1)
        for name, priority in (("a", 5), ("b", -1)):
            engine.add(make_request(name, 3, priority=priority))
        engine.run()
        assert [new.request_id for plan in engine.plans for new in plan.new_requests] == ["a", "b"]

    def test_a_policy_from_outside(self) -> None:
        class ShortestFirst:
            def order_key(self, request: EngineRequest) -> int:
                return len(request.prompt_token_ids)

        engine = make_engine(max_num_seqs=1, policy="shortest", policies={"shortest": ShortestFirst()})
        for name, length in (("c", 9), ("a", 3), ("b", 5)):
            engine.add(make_request(name, length))
        engine.run()
        assert [new.request_id for plan in engine.plans for new in plan.new_requests] == ["a", "b", "c"]

    def test_the_youngest_is_preempted_and_the_oldest_never(self) -> None:
        engine = make_engine(12)
        for name in ("a", "b", "c"):
            engine.add(make_request(name, 8, 30))
        engine.run()
        entered = [new.request_id for plan in engine.plans for new in plan.new_requests]
        assert entered.count("a") == 1
        assert entered.count("c") > 1
        for name in ("a", "b", "c"):
            engine.check_answer(name)
        check_all_returned(engine)

    def test_the_lowest_priority_is_preempted_though_it_is_the_oldest(self) -> None:
        engine = make_engine(12, policy="priority")
        for name, priority in (("low", 1), ("high", 0), ("higher", -1)):
            engine.add(make_request(name, 8, 30, priority=priority))
        engine.run()
        entered = [new.request_id for plan in engine.plans for new in plan.new_requests]
        assert entered.count("higher") == 1
        assert entered.count("low") > 1

    @pytest.mark.parametrize(("num_stream_tokens", "num_blocks"), [(4, 17), (8, 19)])
    def test_a_prompt_takes_blocks_from_a_younger_stream_that_had_its_turn_in_this_step(
        self, num_stream_tokens: int, num_blocks: int
    ) -> None:
        engine = make_engine(num_blocks, max_num_batched_tokens=4)
        engine.add(make_request("prompt", 60, 2))
        engine.add(make_request("stream", num_stream_tokens, 30))
        has_room, plan = False, None
        while engine.scheduler.stats().num_preemptions == 0:
            blocks = engine.scheduler._state.by_id["stream"].blocks
            has_room = blocks.capacity_tokens >= num_stream_tokens + len(engine.tokens("stream"))
            plan = engine.step()
        assert has_room, "the stream needed no block, so its token was in the plan already"
        assert plan is not None and plan.num_scheduled_tokens.keys() == {"prompt"}
        engine.run()
        engine.check_answer("prompt")
        engine.check_answer("stream")

    def test_prompt_logprobs_survive_preemption_in_mid_prefill(self) -> None:
        engine = make_engine(10, max_num_batched_tokens=3)
        engine.add(make_request("old", 8, 24))
        for _ in range(4):
            engine.step()
        engine.add(make_request("new", 24, 4, prompt_logprobs=0))
        sequence, num_entries = engine.scheduler._state.by_id["new"], 0
        while sequence.num_preemptions == 0:
            num_entries = len(sequence.prompt_logprobs or [])
            engine.step()
        assert 0 < num_entries < 23
        engine.run()
        entries = [output.prompt_logprobs for output in engine.outputs["new"] if output.prompt_logprobs]
        assert [len(entry) for entry in entries] == [24]
        engine.check_answer("new")


class TestFairness:
    def test_decoding_goes_on_in_every_step_and_a_short_prompt_overtakes_a_long_one(self) -> None:
        budget = 32
        engine = make_engine(2000, max_num_seqs=64, max_num_batched_tokens=budget)
        streams = [f"stream-{number}" for number in range(4)]
        for name in streams:
            engine.add(make_request(name, 4, 200))
        engine.step()
        engine.add(make_request("long", 20 * budget, 2))
        for _ in range(2):
            engine.step()
        engine.add(make_request("short", 10, 3))
        steps_of_long, steps_of_short = 0, 0
        while not engine.tokens("long"):
            steps_of_long += 1
            steps_of_short += not engine.tokens("short")
            if steps_of_long % 2:
                engine.add(make_request(f"flow-{steps_of_long}", 12, 2))
            plan = engine.step()
            assert plan is not None
            if engine.tokens("long"):
                break
            assert plan.num_tokens == budget, "budget left over while prompts wait"
            assert all(plan.num_scheduled_tokens[name] == 1 for name in streams)
            assert plan.num_scheduled_tokens["long"] >= (budget - len(plan.num_scheduled_tokens)) // 2
        assert steps_of_short <= 2
        assert steps_of_long >= 20
        engine.run()
        for name in engine.requests:
            engine.check_answer(name)

    def test_a_short_prompt_starts_at_once_behind_three_long_ones(self) -> None:
        engine = make_engine(2000, max_num_batched_tokens=64)
        for number in range(3):
            engine.add(make_request(f"long-{number}", 900, 1))
        engine.step()
        engine.add(make_request("short", 8, 1))
        engine.step()
        engine.check_answer("short")

    def test_prompts_below_an_eighth_of_the_budget_are_not_cut(self) -> None:
        engine = make_engine(2000, max_num_seqs=64, max_num_batched_tokens=64)
        for number in range(16):
            engine.add(make_request(str(number), 8, 1))
        engine.step()
        assert [len(engine.tokens(str(number))) for number in range(16)] == [1] * 8 + [0] * 8

    def test_admission_leaves_room_for_the_prompts_in_the_batch(self) -> None:
        """Two prompts that fit the pool one after the other do not push each other out half-way."""
        engine = make_engine(20, max_num_batched_tokens=8)
        for name in ("a", "b"):
            engine.add(make_request(name, 60, 2))
        engine.run()
        assert engine.scheduler.stats().num_preemptions == 0


class TestAbort:
    @pytest.mark.parametrize("num_plans_ahead", [0, 1])
    def test_everything_returns_wherever_the_request_was(self, num_plans_ahead: int) -> None:
        engine = make_engine(40, max_num_seqs=3, max_num_batched_tokens=8, num_plans_ahead=num_plans_ahead)
        engine.add(make_request("decoding", 4, 60))
        engine.add(make_request("decoding too", 4, 60))
        for _ in range(30):
            engine.step()
        engine.add(make_request("mid-prefill", 40, 4))
        engine.add(make_request("waiting", 4, 4))
        engine.step()
        stats = engine.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (3, 1)
        engine.abort("waiting", "mid-prefill", "decoding", "decoding too", "unknown")
        assert not engine.scheduler.has_work()
        engine.flush()
        check_all_returned(engine)
        for name in engine.requests:
            assert engine.finish_reason(name) is FinishReason.ABORT
            engine.check_answer(name)
        assert engine.scheduler.stats().num_finished == {"abort": 4}

    def test_while_preempted(self) -> None:
        engine = make_engine(8)
        for name in ("a", "b"):
            engine.add(make_request(name, 8, 20))
        while engine.scheduler.stats().num_preemptions == 0:
            engine.step()
        engine.abort("b")
        engine.run()
        engine.check_answer("a")
        engine.check_answer("b")
        check_all_returned(engine)

    def test_fifty_requests_of_two_sequences_each_hung_up_after_the_first_chunk(self) -> None:
        engine = make_engine(400, max_num_seqs=32, max_model_len=2000)
        for number in range(50):
            for sibling in range(2):
                engine.add(
                    make_request(
                        f"{number}-{sibling}", list(range(number, number + 9)), 1000, ignore_eos=True
                    )
                )
        while engine.scheduler.has_work():
            engine.step()
            engine.abort(
                *(name for name in engine.requests if engine.tokens(name) and not engine.finish_reason(name))
            )
        check_all_returned(engine)

    @pytest.mark.parametrize("num_plans_ahead", [0, 1])
    def test_blocks_of_an_aborted_request_wait_for_the_step_that_writes_them(
        self, num_plans_ahead: int
    ) -> None:
        engine = make_engine(8, num_plans_ahead=num_plans_ahead)
        engine.add(make_request("a", 12, 4))
        plan = engine.scheduler.schedule()
        assert plan is not None
        engine.scheduler.abort(["a"])
        assert engine.scheduler.stats().num_free_blocks == 5
        result = StepResult(step_id=plan.step_id, sampled_token_ids={"a": [1]})
        assert engine.scheduler.update(plan, result) == []
        check_all_returned(engine)

    def test_an_id_can_be_used_again_while_its_aborted_step_is_in_flight(self) -> None:
        engine = make_engine()
        engine.add(make_request("a", [1, 2, 3], 9))
        plan = engine.scheduler.schedule()
        assert plan is not None
        engine.abort("a")
        engine.add(make_request("a", [4, 5], 2))
        engine.scheduler.update(plan, StepResult(step_id=plan.step_id, sampled_token_ids={"a": [15]}))
        engine.worker.execute(plan)
        engine.run()
        engine.check_answer("a")


class TestQuarantine:
    @pytest.mark.parametrize("enable_prefix_caching", [True, False])
    @pytest.mark.parametrize("when", ["prompt", "chunk", "decode"])
    def test_only_the_request_that_breaks_the_step_fails(
        self, when: str, enable_prefix_caching: bool
    ) -> None:
        # Without the cache a suspect starts from its first token, so it is past the bad place only chunks later.
        engine = make_engine(
            max_num_seqs=9, max_num_batched_tokens=16, enable_prefix_caching=enable_prefix_caching
        )
        bad_position = {"prompt": 0, "chunk": 17, "decode": 22}[when]
        engine.worker.fails_for = lambda request_id, start, end: (
            request_id == "bad" and start <= bad_position < end
        )
        for number in range(4):
            engine.add(make_request(f"good-{number}", 3 + 4 * number, 12))
        engine.add(make_request("bad", 20, 12))
        for number in range(4, 8):
            engine.add(make_request(f"good-{number}", 3 + 2 * number, 12))
        engine.run(max_steps=200)
        for name in engine.requests:
            engine.check_answer(name)
        reasons = {name: engine.finish_reason(name) for name in engine.requests}
        assert reasons.pop("bad") is FinishReason.ERROR
        assert engine.outputs["bad"][-1].error == "the model step raised: the model broke on bad"
        assert set(reasons.values()) == {FinishReason.LENGTH}
        check_all_returned(engine)

    def test_several_bad_requests(self) -> None:
        engine = make_engine()
        engine.worker.fails_for = lambda request_id, start, end: request_id in ("1", "3", "4")
        for number in range(8):
            engine.add(make_request(str(number), 5))
        engine.run(max_steps=100)
        errors = [name for name in engine.requests if engine.finish_reason(name) is FinishReason.ERROR]
        assert errors == ["1", "3", "4"]

    def test_a_step_that_fails_once_harms_nobody(self) -> None:
        engine = make_engine()
        failures = iter([True])
        engine.worker.fails_for = lambda request_id, start, end: next(failures, False)
        for number in range(4):
            engine.add(make_request(str(number), 5))
        engine.run(max_steps=100)
        for number in range(4):
            assert engine.finish_reason(str(number)) is FinishReason.LENGTH
            engine.check_answer(str(number))

    def test_requests_that_break_only_together_still_finish(self) -> None:
        engine = make_engine()
        real_execute = engine.worker.execute

        def execute(plan: Any) -> Any:
            if len(plan.num_scheduled_tokens) > 2:
                engine.worker._apply(plan)
                raise RuntimeError("no room for three")
            return real_execute(plan)

        engine.worker.execute = execute  # type: ignore[method-assign]
        for number in range(4):
            engine.add(make_request(str(number), 5))
        engine.run(max_steps=100)
        for number in range(4):
            assert engine.finish_reason(str(number)) is FinishReason.LENGTH
            engine.check_answer(str(number))

    def test_suspects_can_be_aborted(self) -> None:
        engine = make_engine()
        engine.worker.fails_for = lambda request_id, start, end: request_id == "bad"
        for name in ("a", "bad", "b"):
            engine.add(make_request(name, 5))
        engine.step()
        engine.abort("bad", "b")
        engine.run(max_steps=20)
        engine.check_answer("a")
        assert engine.finish_reason("bad") is FinishReason.ABORT
        check_all_returned(engine)

    def test_aborted_during_the_step_that_failed(self) -> None:
        engine = make_engine()
        engine.add(make_request("a", 5))
        engine.add(make_request("b", 5))
        plan = engine.scheduler.schedule()
        assert plan is not None
        engine.abort("a")
        assert engine.scheduler.fail_step(plan, "broken") == []
        engine.run()
        engine.check_answer("b")
        check_all_returned(engine)

    def test_workers_are_told_again_what_the_failed_plan_removed(self) -> None:
        engine = make_engine()
        engine.add(make_request("gone", 5, 1))
        engine.step()
        engine.add(make_request("a", 5))
        plan = engine.scheduler.schedule()
        assert plan is not None and plan.removed_request_ids == ["gone"]
        engine.scheduler.fail_step(plan, "broken before anything was removed")
        again = engine.scheduler.schedule()
        assert again is not None
        assert again.removed_request_ids == ["gone", "a"]


def test_the_right_answer_needs_no_schedule() -> None:
    """The oracle of these tests, spelled out once."""
    request = make_request("a", [1, 2], 2)
    first = next_token(1, [1, 2])
    assert right_answer(request, 1) == ([first, next_token(1, [1, 2, first])], FinishReason.LENGTH)
