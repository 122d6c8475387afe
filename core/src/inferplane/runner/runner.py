"""`Runner`: executes plans with a loaded model, and samples what they reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from inferplane.api.attention import AttentionInputs
from inferplane.api.comm import Communicator, SoloCommunicator
from inferplane.api.model import ForwardBatch, Model
from inferplane.api.worker import DoneStep, PendingStep
from inferplane.plan import StepPlan, StepResult
from inferplane.request import PositionLogprobs
from inferplane.runner.batch import Batch, HostStep
from inferplane.runner.graphs import DecodeGraphs
from inferplane.runner.kv_groups import KVGroup
from inferplane.runner.logprobs import position_logprobs
from inferplane.runner.pending import PendingSample
from inferplane.runner.staging import StagingBuffer

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime, GraphBackend
    from inferplane.runner.sampler import Sampler

STAGING_BYTES = 1 << 20
"""For the arrays of a step at first; it grows."""
PROMPT_SLICE_ELEMENTS = 1 << 22
"""Logits of a prompt that are computed at once, when their log-probabilities are asked for."""


@dataclass
class _Executed:
    """A step between `execute` and `sample`."""

    step_id: int
    rows: np.ndarray
    """Batch rows that get a token."""
    device_rows: torch.Tensor | None
    logits: torch.Tensor | None
    """[len(rows), vocab_size]"""
    prompt_logprobs: dict[str, list[PositionLogprobs]] = field(default_factory=dict)


class Runner:
    """Holds the model, its KV tensors and the batch of one rank.

    A step is `execute`, then either `sample` (on the rank that has a sampler) or `accept` of what that rank sampled.
    The next step may be executed before the result of `sample` is asked for: the tokens that were sampled stay on the
    device, too, and are taken from there. On the other ranks their values never come to the host.
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
        comm: Communicator | None = None,
    ) -> None:
        """``comm``: of the ranks that run the same plans, of which the first has a sampler."""
        self._model = model
        self._runtime = runtime
        self._kv = kv
        self._groups = list(groups)
        self.batch = batch
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._comm = comm or SoloCommunicator()
        self._last_tokens = torch.zeros(batch.max_num_reqs, dtype=torch.int64, device=runtime.torch_device)
        """For each batch row the token sampled last."""
        self._staging = None if runtime.is_host_memory else StagingBuffer(runtime, STAGING_BYTES)
        self._graphs: DecodeGraphs | None = None
        self._padded: Callable[[int], int] = int
        """Of a number of rows that the last layer computes; the same on every rank."""
        self._executed: _Executed | None = None
        self._errors: dict[str, str] = {}
        """Of requests that were wrong on arrival; reported with the first result after that."""

    @property
    def groups(self) -> Sequence[KVGroup]:
        return self._groups

    @torch.inference_mode()
    def record(
        self, backend: GraphBackend, sizes: Sequence[int], max_model_len: int, scratch_blocks: Sequence[int]
    ) -> float:
        """From now on decode steps replay graphs; see `DecodeGraphs`. Returns the seconds that recording them took."""
        graphs = DecodeGraphs(
            self._model,
            self._runtime,
            backend,
            self._kv,
            self._groups,
            sizes,
            max_model_len=max_model_len,
            scratch_blocks=scratch_blocks,
        )
        self._padded = graphs.padded
        seconds = graphs.record()
        self._graphs = graphs
        return seconds

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> None:
        """Applies the plan to the batch and runs the model up to the logits."""
        self._executed = None
        self.apply(plan)
        executed = _Executed(plan.step_id, np.zeros(0, np.int64), None, None)
        if plan.num_scheduled_tokens:
            step = self.batch.prepare(plan.num_scheduled_tokens)
            executed.rows = step.sample_rows
            hidden, executed.device_rows, sampled_hidden = self._forward(step)
            if len(step.sample_rows):
                executed.logits = self._model.compute_logits(sampled_hidden)
            for span in step.prompt_spans:
                first = span.first_token
                entries = self._prompt_logprobs(
                    hidden[first : first + len(span.token_ids)], span.token_ids, span.num_top
                )
                executed.prompt_logprobs[span.request_id] = entries
            self.batch.advance(step)
        self._executed = executed

    @torch.inference_mode()
    def sample(self) -> PendingStep:
        """Queues the choice of the next token of each request of the executed plan that reached the end of its known
        tokens; the batch counts it from now on. Raises RuntimeError when no plan was executed since the last call."""
        executed = self._take_executed()
        if self._sampler is None:
            raise RuntimeError("this rank does not sample: it accepts the tokens of the rank that does")
        result = StepResult(
            step_id=executed.step_id,
            sampled_token_ids={},
            prompt_logprobs=executed.prompt_logprobs,
            errors=self._take_errors(),
        )
        if executed.logits is None or executed.device_rows is None:
            return DoneStep(result)
        rows, batch = executed.rows, self.batch
        try:
            sampled = self._sampler.sample(
                rows, batch.num_output_tokens(rows), batch.output_tokens, executed.logits
            )
        except BaseException:  # of this rank alone, but the others wait for tokens
            self._comm.broadcast(torch.zeros_like(executed.device_rows))
            raise
        token_ids = self._comm.broadcast(sampled.token_ids)
        self._last_tokens.index_copy_(0, executed.device_rows, token_ids)
        return PendingSample(
            batch=batch,
            places=batch.reserve(rows),
            request_ids=batch.request_ids(rows),
            reading=sampled.start_reading(self._runtime),
            unfinished=result,
        )

    @torch.inference_mode()
    def accept(self) -> None:
        """In place of `sample`: the tokens of the executed plan, from the rank that samples them."""
        executed = self._take_executed()
        if executed.logits is None or executed.device_rows is None:
            return
        token_ids = self._comm.broadcast(torch.empty_like(executed.device_rows))
        self._last_tokens.index_copy_(0, executed.device_rows, token_ids)
        self.batch.reserve(executed.rows)

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

    def _forward(self, step: HostStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states of the step's tokens, or of those alone that get a token where nobody asks for more; batch rows
        of the latter, on the device, and their hidden states."""
        if self._graphs is not None and self._graphs.can_run(step):
            hidden, sample_rows = self._graphs.run(step, self._last_tokens)
            if len(step.sample_rows) == step.num_reqs:
                return hidden, sample_rows, hidden
            at = self._runtime.to_device(torch.from_numpy(step.sample_tokens))
            return (
                hidden,
                self._runtime.to_device(torch.from_numpy(step.sample_rows)),
                hidden.index_select(0, at),
            )
        batch, sample_rows = self.to_device(step)
        wanted = batch.logits_rows
        num_rows = self._padded(max(1, len(wanted)))
        if step.prompt_spans or num_rows >= step.num_tokens:
            hidden = self._model(batch)
            return hidden, sample_rows, hidden.index_select(0, wanted)
        rows = torch.cat([wanted, wanted.new_zeros(num_rows - len(wanted))])
        hidden = self._model(replace(batch, output_rows=rows))
        hidden = hidden[: len(wanted)] if len(hidden) == num_rows else hidden.index_select(0, wanted)
        return hidden, sample_rows, hidden

    def to_device(self, step: HostStep) -> tuple[ForwardBatch, torch.Tensor]:
        """All arrays in one copy; attention metadata is built along the way. Also the step's ``sample_rows``."""
        columns = [
            step.token_ids,
            step.positions,
            step.query_start,
            step.seq_lens,
            step.sample_tokens,
            step.sample_rows,
            step.unknown_rows,
            step.unknown_tokens,
        ]
        for arrays in step.groups:
            columns += [arrays.block_table, arrays.slot_mapping]
        staged = self._copy(columns)
        (
            token_ids,
            positions,
            query_start,
            seq_lens,
            logits_rows,
            sample_rows,
            unknown_rows,
            unknown_tokens,
        ) = staged[:8]
        if len(step.unknown_rows):
            token_ids.index_copy_(0, unknown_tokens, self._last_tokens.index_select(0, unknown_rows))
        query_lens_host, seq_lens_host = step.query_lens.tolist(), step.seq_lens.tolist()
        metadata, expanded = {}, {}
        for group, block_table, slot_mapping in zip(self._groups, staged[8::2], staged[9::2]):
            inputs = AttentionInputs(
                num_reqs=step.num_reqs,
                num_tokens=step.num_tokens,
                query_lens_host=query_lens_host,
                seq_lens_host=seq_lens_host,
                query_start=query_start,
                seq_lens=seq_lens,
                block_table=block_table,
                slot_mapping=slot_mapping,
                block_size=group.block_size,
            )
            of_group, prompts = group.build_step(inputs)
            metadata.update(of_group)
            expanded.update(prompts)
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            logits_rows=logits_rows,
            kv=self._kv,
            metadata=metadata,
            expanded=expanded,
            query_lens_host=query_lens_host,
            query_start=query_start,
        )
        return batch, sample_rows

    def _copy(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        if self._staging is None:
            return [self._runtime.to_device(torch.from_numpy(array)) for array in arrays]
        return self._staging.copy(arrays)

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
