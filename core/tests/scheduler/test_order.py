"""What the scheduler takes first, what it leaves out because it is cached, and that nobody waits for ever."""

from __future__ import annotations

import pytest

from inferplane.request import EngineRequest
from scheduler_cases import BLOCK_SIZE, check_all_returned, make_engine, make_request


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
