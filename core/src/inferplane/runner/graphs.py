"""`DecodeGraphs`: steps in which each request has one token, recorded for batch sizes and replayed."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from inferplane.api.attention import AttentionInputs
from inferplane.api.model import ForwardBatch, Model
from inferplane.runner.graph_inputs import GraphInputs, HostGraphInputs, StagedGraphInputs

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime, Graph, GraphBackend
    from inferplane.runner.batch import HostStep
    from inferplane.runner.kv_groups import KVGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Step:
    """What is recorded for one batch size."""

    size: int
    inputs: list[AttentionInputs]
    metadata: list[dict[str, Any]]
    batch: ForwardBatch


@dataclass(frozen=True)
class _Rung:
    """The graph of one batch size."""

    size: int
    graph: Graph
    inputs: list[AttentionInputs]
    """For each KV group, with the persistent tensors."""
    metadata: list[dict[str, Any]]


class DecodeGraphs:
    """Records the model's forward pass for batch sizes, and runs any decode step with the recording that fits.

    A ladder of sizes is recorded at the start, and a step runs on the next larger one. A backend that
    `records_on_demand` gets every size by itself, when it first comes up. Logits are computed outside: their launches
    are queued while the graph runs, and the memory for them is taken once for all sizes.
    """

    def __init__(
        self,
        model: Model,
        runtime: DeviceRuntime,
        backend: GraphBackend,
        kv: Mapping[str, torch.Tensor],
        groups: Sequence[KVGroup],
        sizes: Sequence[int],
        *,
        max_model_len: int,
        scratch_blocks: Sequence[int],
    ) -> None:
        """``sizes``: batch sizes to record, at least one, of which a backend that records on demand heeds the largest;
        ``scratch_blocks``: for each group a block id that no request gets."""
        self._model = model
        self._backend = backend
        self._kv = kv
        self._groups = list(groups)
        self._largest = max(sizes)
        self._sizes = [1] if backend.records_on_demand else sorted(sizes)
        self._max_model_len = max_model_len
        self._rungs: dict[int, _Rung] = {}
        self._inputs = self._make_inputs(runtime, scratch_blocks)
        device = runtime.torch_device
        self._query_start = torch.arange(self._largest + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(self._largest, device=device)
        self._hidden = torch.empty(0, device=device)
        """[largest size, hidden_size], once something is recorded."""

    def _make_inputs(self, runtime: DeviceRuntime, scratch_blocks: Sequence[int]) -> GraphInputs:
        block_sizes = [group.block_size for group in self._groups]
        widths = [-(-self._max_model_len // size) for size in block_sizes]
        if runtime.is_host_memory:
            return HostGraphInputs(self._largest, block_sizes, widths, scratch_blocks)
        return StagedGraphInputs(runtime, self._largest, block_sizes, widths, scratch_blocks)

    @property
    def sizes(self) -> list[int]:
        """Those recorded so far."""
        return sorted(self._rungs)

    def padded(self, num_rows: int) -> int:
        """A number of rows, no fewer: that of a graph, for which libraries have loaded their kernels, or beyond a
        multiple of the largest's. Where every size is recorded on demand, ``num_rows`` itself."""
        if self._backend.records_on_demand:
            return num_rows
        at = bisect_left(self._sizes, num_rows)
        return self._sizes[at] if at < len(self._sizes) else -(-num_rows // self._largest) * self._largest

    def can_run(self, step: HostStep) -> bool:
        """Whether `run` takes the step. On demand, this is where a size is recorded that comes up for the first time;
        if that fails, nothing is replayed any more."""
        n = step.num_reqs
        if not self._rungs or not step.has_one_token_each or n > self._largest:
            return False
        if self._backend.records_on_demand and n not in self._rungs:
            try:
                self._inputs.clear()
                self._record(self._prepare(n))
            except RuntimeError as error:
                logger.warning("decode steps run without graphs from now on: recording failed: %s", error)
                self._rungs.clear()
                return False
        return True

    def record(self) -> float:
        """Records the sizes that are recorded at the start, the largest first, so that the others find its memory.
        Returns the seconds that it took.

        Raises RuntimeError where the model does what cannot be recorded.
        """
        started = time.perf_counter()
        try:
            steps = [self._prepare(size) for size in reversed(self._sizes)]
            self._backend.rehearse([partial(self._model.forward, step.batch) for step in steps])
            for step in steps:
                self._record(step)
        except RuntimeError:
            self._rungs.clear()
            raise
        return time.perf_counter() - started

    def _prepare(self, size: int) -> _Step:
        inputs = [self._attention_inputs(index, size) for index in range(len(self._groups))]
        metadata = [group.build_metadata(each) for group, each in zip(self._groups, inputs)]
        batch = ForwardBatch(
            token_ids=self._inputs.token_ids[:size],
            positions=self._inputs.positions[:size],
            logits_rows=self._rows[:size],
            kv=self._kv,
            metadata={name: each for group in metadata for name, each in group.items()},
        )
        return _Step(size, inputs, metadata, batch)

    def _record(self, step: _Step) -> None:
        if not len(self._hidden):
            hidden = self._model(step.batch)
            self._hidden = hidden.new_empty(self._largest, *hidden.shape[1:])
        graph = self._backend.capture(self._forward(step))
        self._rungs[step.size] = _Rung(step.size, graph, step.inputs, step.metadata)

    def _forward(self, step: _Step) -> Callable[[], None]:
        def run() -> None:
            self._hidden[: step.size].copy_(self._model(step.batch))

        return run

    def _attention_inputs(self, group: int, size: int) -> AttentionInputs:
        return AttentionInputs(
            num_reqs=size,
            num_tokens=size,
            query_lens_host=[1] * size,
            seq_lens_host=[self._max_model_len] * size,
            query_start=self._query_start[: size + 1],
            seq_lens=self._inputs.seq_lens[:size],
            block_table=self._inputs.tables[group][:size],
            slot_mapping=self._inputs.slots[group][:size],
            block_size=self._groups[group].block_size,
            for_graph=True,
        )

    def run(self, step: HostStep, last_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states ``[num_reqs, hidden_size]`` of a step that `can_run`, and its ``sample_rows`` on the device,
        both until the next call.

        ``last_tokens: [max_num_reqs]`` int64 on the device has, for each batch row, the token that was sampled last.
        """
        rung = self._rung(step.num_reqs)
        rows = self._inputs.fill(step, rung.size)
        if len(step.unknown_rows):
            known = last_tokens.index_select(0, rows.unknown_rows)
            self._inputs.token_ids.index_copy_(0, rows.unknown_tokens, known)
        self._refresh(rung)
        rung.graph.replay()
        return self._hidden[: step.num_reqs], rows.sample_rows

    def _rung(self, num_reqs: int) -> _Rung:
        if self._backend.records_on_demand:
            return self._rungs[num_reqs]
        return self._rungs[self._sizes[bisect_left(self._sizes, num_reqs)]]

    def _refresh(self, rung: _Rung) -> None:
        seq_lens_host = self._inputs.host_seq_lens[: rung.size].tolist()
        for group, inputs, metadata in zip(self._groups, rung.inputs, rung.metadata):
            inputs.seq_lens_host = seq_lens_host
            group.refresh_metadata(metadata, inputs)
