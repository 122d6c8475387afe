"""A rank on its own: what it does with commands that come after a step that failed on its side."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from inferplane.executor.messages import DidFail, Execute
from inferplane.executor.rank import Rank
from inferplane.plan import StepPlan


class RecordingWorker:
    """Fails the steps whose plan has the id 13."""

    def __init__(self) -> None:
        self.step_ids: list[int] = []

    def execute(self, plan: StepPlan) -> None:
        self.step_ids.append(plan.step_id)
        if plan.step_id == 13:
            raise ValueError("unlucky")

    def accept(self) -> None:
        return


@pytest.fixture
def rank() -> Iterator[Rank]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        made = Rank(folder, rank=1, world_size=2)
        yield made
        made._context.destroy(linger=0)


def test_nothing_is_executed_between_a_failure_and_the_question_about_it(rank: Rank) -> None:
    worker = rank._worker = RecordingWorker()  # type: ignore[assignment]
    for number, step_id in enumerate((12, 13, 14), start=1):
        rank._execute(Execute(number, StepPlan(step_id=step_id)))
    assert worker.step_ids == [12, 13], "step 14 builds on what step 13 has not computed"
    assert rank._obey(DidFail(call_id=1, number=2)) == 1
    assert rank._obey(DidFail(call_id=2, number=2)) == 0
    rank._execute(Execute(4, StepPlan(step_id=15)))
    assert worker.step_ids == [12, 13, 15]
