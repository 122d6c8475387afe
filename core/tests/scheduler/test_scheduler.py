"""The scheduler with a worker that verifies every plan: limits, ends and seeds. Random schedules are in
`test_schedules.py`."""

from __future__ import annotations

import pytest

from inferplane.plan import StepResult
from inferplane.request import FinishReason
from inferplane.scheduler import QueueFullError, RequestTooLargeError
from scheduler_cases import BLOCK_SIZE, check_all_returned, make_engine, make_request
from simulated_engine import logprobs_of, next_token, right_answer


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

    def test_prompts_get_less_of_a_step_in_which_others_decode(self) -> None:
        engine = make_engine(max_num_seqs=4, max_num_batched_tokens=32, max_num_mixed_prompt_tokens=6)
        engine.add(make_request("stream", 5, 30))
        engine.step()
        for number in range(3):
            engine.add(make_request(f"prompt-{number}", 20))
        sizes = []
        while engine.scheduler.has_work():
            plan = engine.step()
            assert plan is not None
            decoding = [num for num in plan.num_scheduled_tokens.values() if num == 1]
            sizes.append(sum(plan.num_scheduled_tokens.values()) - len(decoding))
            assert plan.num_scheduled_tokens.get("stream", 1) == 1
        assert max(sizes) == 6
        for name in ("stream", "prompt-0", "prompt-1", "prompt-2"):
            engine.check_answer(name)
        check_all_returned(engine)

    @pytest.mark.parametrize(
        ("num_streams", "num_prompts", "is_limited"),
        [(1, 2, False), (2, 3, False), (2, 2, True), (3, 9, True)],
    )
    def test_few_streams_wait_for_the_prompts_of_more(
        self, num_streams: int, num_prompts: int, is_limited: bool
    ) -> None:
        engine = make_engine(max_num_seqs=16, max_num_batched_tokens=32, max_num_mixed_prompt_tokens=6)
        for number in range(num_streams):
            engine.add(make_request(f"stream-{number}", 5, 30))
        engine.step()
        for number in range(num_prompts):
            engine.add(make_request(f"prompt-{number}", 20))
        plan = engine.step()
        assert plan is not None
        assert sum(plan.num_scheduled_tokens.values()) == (num_streams + 6 if is_limited else 32)

    def test_few_streams_wait_for_some_steps_in_a_row_only(self) -> None:
        """Beside prompts of many steps; those that run count as well as those that wait."""
        engine = make_engine(
            max_num_seqs=16, max_num_batched_tokens=32, max_num_mixed_prompt_tokens=6, num_blocks=400
        )
        engine.add(make_request("stream", 5, 60))
        engine.step()
        for number in range(3):
            engine.add(make_request(f"prompt-{number}", 200))
        sizes = []
        for _ in range(12):
            plan = engine.step()
            assert plan is not None and plan.num_scheduled_tokens["stream"] == 1
            sizes.append(sum(plan.num_scheduled_tokens.values()))
        assert sizes == [32] * 4 + [7] * 8

    def test_prompts_have_the_whole_step_while_nobody_decodes(self) -> None:
        engine = make_engine(max_num_batched_tokens=32, max_num_mixed_prompt_tokens=6)
        for number in range(2):
            engine.add(make_request(str(number), 20))
        plan = engine.step()
        assert plan is not None and sum(plan.num_scheduled_tokens.values()) == 32

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


def test_the_right_answer_needs_no_schedule() -> None:
    """The oracle of these tests, spelled out once."""
    request = make_request("a", [1, 2], 2)
    first = next_token(1, [1, 2])
    assert right_answer(request, 1) == ([first, next_token(1, [1, 2, first])], FinishReason.LENGTH)
