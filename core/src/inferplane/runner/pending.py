"""`PendingSample`: a step between the launch of its sampling and the moment when the host reads its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferplane.api.worker import PendingStep
from inferplane.plan import StepResult

if TYPE_CHECKING:
    from inferplane.runner.batch import Batch, TokenPlaces
    from inferplane.runner.sampler import Reading


@dataclass
class PendingSample(PendingStep):
    """Of the batch rows that got a token. By the time of `result` they may belong to other requests."""

    batch: Batch
    places: TokenPlaces
    request_ids: list[str]
    reading: Reading
    unfinished: StepResult
    """What is known without the device."""

    def result(self) -> StepResult:
        result, ids, choices = self.unfinished, self.request_ids, self.reading.read()
        self.batch.fill(self.places, choices.token_ids)
        result.logprobs = {ids[index]: [entry] for index, entry in choices.logprobs.items()}
        result.errors.update((ids[index], error) for index, error in choices.errors.items())
        tokens, errors = zip(ids, choices.token_ids.tolist()), result.errors
        result.sampled_token_ids = {name: [token] for name, token in tokens if name not in errors}
        return result
