"""`DecodeGraphs`: steps in which each request has one token, recorded for a ladder of batch sizes and replayed."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from inferplane.api.attention import AttentionInputs
from inferplane.api.model import ForwardBatch, Model
from inferplane.runner.staging import ALIGNMENT_BYTES, StagingBuffer

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime, Graph, GraphBackend
    from inferplane.runner.batch import HostStep
    from inferplane.runner.kv_groups import KVGroup


@dataclass(frozen=True)
class _Rung:
    """The graph of one batch size."""

    size: int
    graph: Graph
    inputs: list[AttentionInputs]
    """For each KV group, with the persistent tensors."""
    metadata: list[dict[str, Any]]


class DecodeGraphs:
    """Records the model's forward pass for each batch size, and then runs any decode step with the next larger one.

    The graphs read persistent tensors on the device, which one copy from the host fills for each step. Rows beyond the
    step's requests are sequences of one token in a scratch block, which belongs to no request. Logits are computed
    outside: their launches are queued while the graph runs, and the memory for them is taken once for all sizes.
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
        """``sizes``: batch sizes to record, at least one; ``scratch_blocks``: for each group a block id that no request
        gets."""
        self._model = model
        self._backend = backend
        self._kv = kv
        self._groups = list(groups)
        self._sizes = sorted(sizes)
        self._max_model_len = max_model_len
        self._rungs: list[_Rung] = []
        """By size, once recorded."""
        largest, device = self._sizes[-1], runtime.torch_device
        widths = [-(-max_model_len // group.block_size) for group in groups]
        self._host = _PaddedStep(largest, [group.block_size for group in groups], scratch_blocks)
        self._staging = StagingBuffer(runtime, _staging_bytes(largest, widths))
        self._token_ids, self._positions, self._seq_lens, *self._slots = self._staging.copy(
            self._host.columns()
        )
        self._tables = [
            torch.full((largest, width), block, dtype=torch.int32, device=device)
            for width, block in zip(widths, scratch_blocks)
        ]
        self._query_start = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(largest, device=device)
        self._hidden = torch.empty(0, device=device)
        """[largest size, hidden_size], once recorded."""

    @property
    def sizes(self) -> list[int]:
        return list(self._sizes)

    def can_run(self, step: HostStep) -> bool:
        return bool(self._rungs) and step.has_one_token_each and step.num_reqs <= self._sizes[-1]

    def record(self) -> float:
        """Records all sizes, the largest first, so that the others find its memory. Returns the seconds that it took.

        Raises RuntimeError where the model does what cannot be recorded.
        """
        started = time.perf_counter()
        rungs: list[_Rung] = []
        for size in reversed(self._sizes):
            inputs = [self._inputs(index, size) for index in range(len(self._groups))]
            metadata = [group.build_metadata(each) for group, each in zip(self._groups, inputs)]
            batch = ForwardBatch(
                token_ids=self._token_ids[:size],
                positions=self._positions[:size],
                logits_rows=self._rows[:size],
                kv=self._kv,
                metadata={name: each for group in metadata for name, each in group.items()},
            )
            if not rungs:
                self._hidden = torch.empty_like(self._model(batch))
            rungs.append(_Rung(size, self._backend.capture(self._forward(batch, size)), inputs, metadata))
        self._rungs = rungs[::-1]
        return time.perf_counter() - started

    def _forward(self, batch: ForwardBatch, size: int) -> Callable[[], None]:
        def run() -> None:
            self._hidden[:size].copy_(self._model(batch))

        return run

    def _inputs(self, group: int, size: int) -> AttentionInputs:
        return AttentionInputs(
            num_reqs=size,
            num_tokens=size,
            query_lens_host=[1] * size,
            seq_lens_host=[self._max_model_len] * size,
            query_start=self._query_start[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_table=self._tables[group][:size],
            slot_mapping=self._slots[group][:size],
            block_size=self._groups[group].block_size,
            for_graph=True,
        )

    def run(self, step: HostStep, last_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states ``[num_reqs, hidden_size]`` of a step that `can_run`, and its ``sample_rows`` on the device,
        both until the next call.

        ``last_tokens: [max_num_reqs]`` int64 on the device has, for each batch row, the token that was sampled last.
        """
        rung = self._rungs[bisect_left(self._sizes, step.num_reqs)]
        host = self._host
        host.take(step)
        columns, tables = host.columns(), host.tables(step, rung.size)
        staged = self._staging.copy(
            [*columns, *tables, step.unknown_rows, step.unknown_tokens, step.sample_rows]
        )
        for table, filled in zip(self._tables, staged[len(columns) :]):
            table[: rung.size, : filled.shape[1]].copy_(filled)
        rows, tokens, sample_rows = staged[-3:]
        if len(step.unknown_rows):
            self._token_ids.index_copy_(0, tokens, last_tokens.index_select(0, rows))
        self._refresh(rung, step.num_reqs)
        rung.graph.replay()
        return self._hidden[: step.num_reqs], sample_rows

    def _refresh(self, rung: _Rung, num_reqs: int) -> None:
        seq_lens_host = self._host.seq_lens[: rung.size].tolist()
        for group, inputs, metadata in zip(self._groups, rung.inputs, rung.metadata):
            inputs.seq_lens_host = seq_lens_host
            group.refresh_metadata(metadata, inputs)


class _PaddedStep:
    """The columns of a step in host memory, filled up to the largest batch size with rows that harm nobody."""

    def __init__(self, size: int, block_sizes: Sequence[int], scratch_blocks: Sequence[int]) -> None:
        self.token_ids = np.zeros(size, np.int64)
        self.positions = np.zeros(size, np.int64)
        self.seq_lens = np.ones(size, np.int32)
        self._scratch_blocks = scratch_blocks
        self._scratch_slots = [block * size for block, size in zip(scratch_blocks, block_sizes)]
        self._slots = [np.full(size, slot, np.int64) for slot in self._scratch_slots]

    def columns(self) -> list[np.ndarray]:
        """Of one size in every step."""
        return [self.token_ids, self.positions, self.seq_lens, *self._slots]

    def take(self, step: HostStep) -> None:
        n = step.num_reqs
        padding: list[tuple[np.ndarray, np.ndarray, int]] = [
            (self.token_ids, step.token_ids, 0),
            (self.positions, step.positions, 0),
            (self.seq_lens, step.seq_lens, 1),
        ]
        slots = zip(self._slots, step.groups, self._scratch_slots)
        padding += [(column, group.slot_mapping, slot) for column, group, slot in slots]
        for column, values, fill in padding:
            column[:n] = values
            column[n:] = fill

    def tables(self, step: HostStep, size: int) -> list[np.ndarray]:
        """As wide as the step needs."""
        tables = []
        for group, scratch_block in zip(step.groups, self._scratch_blocks):
            table = np.full((size, group.block_table.shape[1]), scratch_block, np.int32)
            table[: step.num_reqs] = group.block_table
            tables.append(table)
        return tables


def _staging_bytes(size: int, widths: Sequence[int]) -> int:
    """The persistent columns must not move, so the buffer is made as large as it can get."""
    columns = size * (8 + 8 + 4 + 8 * len(widths))
    tables = sum(4 * size * width for width in widths)
    rows = 3 * 8 * size
    return columns + tables + rows + ALIGNMENT_BYTES * (3 + 2 * len(widths) + 3)
