"""`PoolingRunner`: executes plans with a model that makes vectors of prompts instead of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from inferplane.api.model import Model
from inferplane.api.worker import DoneStep, PendingStep
from inferplane.plan import NewRequest, StepPlan, StepResult
from inferplane.runner.batch import Batch, HostStep
from inferplane.runner.kv_groups import KVGroup
from inferplane.runner.pooled_vector import encode_vector, finish_vector
from inferplane.runner.pooler import Pooler
from inferplane.runner.runner import Runner

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime, HostCopy
    from inferplane.config import PoolerConfig

NOT_FINITE = "the model's hidden states are not finite numbers; a wider dtype may help"


@dataclass(frozen=True)
class _Pooled:
    """A step between `execute` and `sample`."""

    step_id: int
    requests: list[NewRequest]
    """Those that are complete."""
    vectors: torch.Tensor | None
    """One for each of them; None where there are none."""


class PoolingRunner(Runner):
    """As `Runner`, but what comes of a request is one vector, with its last step."""

    def __init__(
        self,
        model: Model,
        runtime: DeviceRuntime,
        kv: Mapping[str, torch.Tensor],
        groups: Sequence[KVGroup],
        batch: Batch,
        pooler: PoolerConfig,
        vocab_size: int,
    ) -> None:
        super().__init__(model, runtime, kv, groups, batch, None, vocab_size)
        self._config = pooler
        self._pooler = Pooler(pooler.kind, batch.max_num_reqs, runtime)
        self._requests: dict[str, NewRequest] = {}
        self._pooled: _Pooled | None = None

    def apply(self, plan: StepPlan) -> None:
        for request_id in plan.removed_request_ids:
            self._requests.pop(request_id, None)
        self._requests.update((request.request_id, request) for request in plan.new_requests)
        super().apply(plan)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Applies the plan to the batch and runs the model up to the vectors, on every rank."""
        self._pooled = None
        self.apply(plan)
        requests: list[NewRequest] = []
        vectors = None
        if plan.num_scheduled_tokens:
            step = self.batch.prepare(plan.num_scheduled_tokens)
            is_complete = step.seq_lens == self.batch.num_tokens[step.rows]
            vectors = self._vectors(step, is_complete)
            ids = self.batch.request_ids(step.rows[is_complete])
            requests = [self._requests[request_id] for request_id in ids]
            self.batch.advance(step)
        self._pooled = _Pooled(plan.step_id, requests, vectors)

    @torch.inference_mode()
    def sample(self) -> PendingStep:
        """The vectors of the executed plan, on their way to the host. Raises RuntimeError when there is none."""
        pooled, self._pooled = self._pooled, None
        if pooled is None:
            raise RuntimeError(
                "there is no executed plan to take vectors of: execute one first, and ask once"
            )
        if pooled.vectors is None:
            return DoneStep(StepResult(step_id=pooled.step_id, sampled_token_ids={}))
        return _PendingVectors(
            pooled.step_id, pooled.requests, self._runtime.to_host_async(pooled.vectors), self._config
        )

    def accept(self) -> None:
        """No rank samples anything."""
        self._pooled = None

    def _vectors(self, step: HostStep, is_complete: np.ndarray) -> torch.Tensor | None:
        batch, _ = self.to_device(step)
        batch.token_types = self._token_types(step)
        hidden = self._model(batch)
        pooled = self._pooler.pool(step, hidden, is_complete)
        if not len(pooled):
            return None
        return self._model.compute_logits(pooled.to(hidden.dtype)).float() if self._config.labels else pooled

    def _token_types(self, step: HostStep) -> torch.Tensor | None:
        """None where no request of the step is a pair."""
        requests = [self._requests[request_id] for request_id in self.batch.request_ids(step.rows)]
        starts = [request.second_text_start for request in requests]
        if all(start is None for start in starts):
            return None
        ends = [
            len(request.token_ids) if start is None else start for request, start in zip(requests, starts)
        ]
        is_second = step.positions >= np.repeat(np.array(ends, np.int64), step.query_lens)
        return self._runtime.to_device(torch.from_numpy(is_second.astype(np.int64)))


@dataclass(frozen=True)
class _PendingVectors(PendingStep):
    step_id: int
    requests: list[NewRequest]
    copy: HostCopy
    pooler: PoolerConfig

    def result(self) -> StepResult:
        result = StepResult(step_id=self.step_id, sampled_token_ids={})
        for request, vector in zip(self.requests, self.copy.tensor().numpy()):
            if request.pooling is None:  # a step before the first request
                continue
            if not np.isfinite(vector).all():
                result.errors[request.request_id] = NOT_FINITE
                continue
            finished = finish_vector(vector, request.pooling, self.pooler)
            result.pooled[request.request_id] = encode_vector(finished)
        return result
