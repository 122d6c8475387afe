"""`Runner`: executes plans with a loaded model, and samples what they reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from inferplane.api.attention import AttentionInputs
from inferplane.api.model import ForwardBatch, Model
from inferplane.plan import StepPlan, StepResult
from inferplane.request import PositionLogprobs
from inferplane.runner.batch import Batch, HostStep
from inferplane.runner.kv_groups import KVGroup
from inferplane.runner.logprobs import position_logprobs

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime
    from inferplane.runner.sampler import Sampler

PROMPT_SLICE_ELEMENTS = 1 << 22
"""Logits of a prompt that are computed at once, when their log-probabilities are asked for."""


@dataclass
class _Executed:
    """A step between `execute` and `sample`."""

    step_id: int
    rows: np.ndarray
    """Batch rows that get a token."""
    logits: torch.Tensor | None
    """[len(rows), vocab_size]"""
    prompt_logprobs: dict[str, list[PositionLogprobs]] = field(default_factory=dict)


class Runner:
    """Holds the model, its KV tensors and the batch of one rank.

    A step is `execute`, then either `sample` (on the rank that has a sampler) or `accept` with what that rank sampled.
    When `execute` raises, no request has moved on; those the plan removed are gone and those it brought may be in the
    batch, so that a next plan that removes them finds a batch in order.
    """

    def __init__(
        self,
        model: Model,
        runtime: DeviceRuntime,
        kv: Mapping[str, torch.Tensor],
        groups: Sequence[KVGroup],
        batch: Batch,
        sampler: Sampler | None,
        vocab_size: int,
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._kv = kv
        self._groups = list(groups)
        self.batch = batch
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._executed: _Executed | None = None
        self._errors: dict[str, str] = {}
        """Of requests that were wrong on arrival; reported with the first result after that."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Applies the plan to the batch and runs the model up to the logits."""
        self._executed = None
        self.apply(plan)
        executed = _Executed(plan.step_id, np.zeros(0, np.int64), None)
        if plan.num_scheduled_tokens:
            step = self.batch.prepare(plan.num_scheduled_tokens)
            batch = self.to_device(step)
            hidden = self._model(batch)
            executed.rows = step.sample_rows
            if len(step.sample_rows):
                executed.logits = self._model.compute_logits(hidden.index_select(0, batch.logits_rows))
            for span in step.prompt_spans:
                first = span.first_token
                entries = self._prompt_logprobs(
                    hidden[first : first + len(span.token_ids)], span.token_ids, span.num_top
                )
                executed.prompt_logprobs[span.request_id] = entries
            self.batch.advance(step)
        self._executed = executed

    @torch.inference_mode()
    def sample(self) -> StepResult:
        """Chooses the next token of each request of the executed plan that reached the end of its known tokens, and
        appends it to the batch. Raises RuntimeError when no plan was executed since the last call."""
        executed = self._take_executed()
        if self._sampler is None:
            raise RuntimeError("this rank does not sample: it accepts the tokens of the rank that does")
        result = StepResult(
            step_id=executed.step_id,
            sampled_token_ids={},
            prompt_logprobs=executed.prompt_logprobs,
            errors=self._take_errors(),
        )
        if executed.logits is None:
            return result
        rows, batch = executed.rows, self.batch
        sampled = self._sampler.sample(
            rows, batch.num_output_tokens(rows), batch.output_tokens, executed.logits
        )
        choices = sampled.read(self._runtime)
        token_ids, ids = choices.token_ids, batch.request_ids(rows)
        result.logprobs = {ids[index]: [entry] for index, entry in choices.logprobs.items()}
        result.errors.update((ids[index], error) for index, error in choices.errors.items())
        if result.errors:
            at = np.array(
                [index for index, request_id in enumerate(ids) if request_id not in result.errors], np.int64
            )
            rows, token_ids, ids = rows[at], token_ids[at], [ids[index] for index in at]
        batch.append_tokens(rows, token_ids)
        self._sampler.append(rows, token_ids)
        result.sampled_token_ids = {request_id: [token] for request_id, token in zip(ids, token_ids.tolist())}
        return result

    def accept(self, sampled_token_ids: Mapping[str, Sequence[int]]) -> None:
        """In place of `sample`: the tokens of the executed plan, as the sampling rank's result has them."""
        self._take_executed()
        rows = np.array([self.batch.row_of(request_id) for request_id in sampled_token_ids], np.int64)
        token_ids = np.array([token_id for (token_id,) in sampled_token_ids.values()], np.int64)
        self.batch.append_tokens(rows, token_ids)

    def apply(self, plan: StepPlan) -> None:
        """The plan's differences, without running anything."""
        for request_id in plan.removed_request_ids:
            row = self.batch.remove(request_id)
            self._errors.pop(request_id, None)
            if row is not None and self._sampler is not None:
                self._sampler.remove(row)
        for request in plan.new_requests:
            row = self.batch.add(request)
            if self._sampler is not None:
                error = self._sampler.add(row, request, self.batch.known_tokens(row))
                if error is not None:
                    self._errors[request.request_id] = error
        for request_id, block_ids in plan.new_block_ids.items():
            self.batch.append_blocks(request_id, block_ids)

    def to_device(self, step: HostStep) -> ForwardBatch:
        """One copy for each array; attention metadata is built along the way."""
        query_start, seq_lens = self._copy(step.query_start), self._copy(step.seq_lens)
        query_lens_host, seq_lens_host = step.query_lens.tolist(), step.seq_lens.tolist()
        metadata = {}
        for group, arrays in zip(self._groups, step.groups):
            inputs = AttentionInputs(
                num_reqs=step.num_reqs,
                num_tokens=step.num_tokens,
                query_lens_host=query_lens_host,
                seq_lens_host=seq_lens_host,
                query_start=query_start,
                seq_lens=seq_lens,
                block_table=self._copy(arrays.block_table),
                slot_mapping=self._copy(arrays.slot_mapping),
                block_size=group.block_size,
            )
            metadata.update(group.build_metadata(inputs))
        return ForwardBatch(
            token_ids=self._copy(step.token_ids),
            positions=self._copy(step.positions),
            logits_rows=self._copy(step.sample_tokens),
            kv=self._kv,
            metadata=metadata,
        )

    def _copy(self, array: np.ndarray) -> torch.Tensor:
        return self._runtime.to_device(torch.from_numpy(array))

    def _prompt_logprobs(
        self, hidden: torch.Tensor, token_ids: np.ndarray, num_top: int
    ) -> list[PositionLogprobs]:
        """In slices, because a long prompt's logits would take more memory than the model. Every rank computes the
        logits, which may be spread over all; only the sampling one makes entries of them."""
        size = PROMPT_SLICE_ELEMENTS // self._vocab_size + 1
        entries: list[PositionLogprobs] = []
        for start in range(0, len(token_ids), size):
            logits = self._model.compute_logits(hidden[start : start + size])
            if self._sampler is not None:
                part = token_ids[start : start + size]
                entries += position_logprobs(logits, part, np.full(len(part), num_top), self._runtime)
        return entries

    def _take_executed(self) -> _Executed:
        executed, self._executed = self._executed, None
        if executed is None:
            raise RuntimeError("there is no executed plan to sample: execute one first, and sample it once")
        return executed

    def _take_errors(self) -> dict[str, str]:
        errors, self._errors = self._errors, {}
        return errors
