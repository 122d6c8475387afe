"""Requests that go before their end: hung up, or suspected of breaking a step."""

from __future__ import annotations

from typing import Any

import pytest

from inferplane.plan import StepResult
from inferplane.request import FinishReason
from scheduler_cases import check_all_returned, make_engine, make_request


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
