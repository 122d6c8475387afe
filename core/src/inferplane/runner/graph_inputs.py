"""`GraphInputs`: the persistent tensors that recorded decode steps read, and how a step gets into them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from inferplane.runner.staging import ALIGNMENT_BYTES, StagingBuffer

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime
    from inferplane.runner.batch import HostStep


@dataclass(frozen=True)
class StepRows:
    """Where tokens come from and go to in one step, on the device."""

    unknown_rows: torch.Tensor
    unknown_tokens: torch.Tensor
    sample_rows: torch.Tensor
    """As in `HostStep`."""


class GraphInputs(ABC):
    """Columns of one element for each row, and block tables as wide as the longest sequence needs, at fixed addresses.

    Rows beyond a step's requests are sequences of one token in a scratch block, which belongs to no request.
    """

    token_ids: torch.Tensor
    """[num_rows] int64"""
    positions: torch.Tensor
    """[num_rows] int64"""
    seq_lens: torch.Tensor
    """[num_rows] int32"""
    slots: Sequence[torch.Tensor]
    """For each group, [num_rows] int64"""
    tables: Sequence[torch.Tensor]
    """For each group, [num_rows, blocks of the longest sequence] int32"""

    def __init__(
        self, num_rows: int, block_sizes: Sequence[int], widths: Sequence[int], scratch_blocks: Sequence[int]
    ) -> None:
        """``widths`` and ``scratch_blocks``: for each group the columns of its table and a block id for spare rows."""
        self._scratch_blocks = scratch_blocks
        self._widths = widths
        self._host_token_ids = np.zeros(num_rows, np.int64)
        self._host_positions = np.zeros(num_rows, np.int64)
        self.host_seq_lens = np.ones(num_rows, np.int32)
        self._scratch_slots = [block * size for block, size in zip(scratch_blocks, block_sizes)]
        self._host_slots = [np.full(num_rows, slot, np.int64) for slot in self._scratch_slots]

    @abstractmethod
    def clear(self) -> None:
        """Spare rows only, as at first: a recording must not touch what requests have stored."""

    @abstractmethod
    def fill(self, step: HostStep, num_rows: int) -> StepRows:
        """The step's requests first, and spare rows up to ``num_rows``."""

    def _fill_columns(self, step: HostStep | None) -> None:
        n = 0 if step is None else step.num_reqs
        for column, spare in zip(self._columns, (0, 0, 1, *self._scratch_slots)):
            column[n:] = spare
        if step is not None:
            self._host_token_ids[:n] = step.token_ids
            self._host_positions[:n] = step.positions
            self.host_seq_lens[:n] = step.seq_lens
            for slots, group in zip(self._host_slots, step.groups):
                slots[:n] = group.slot_mapping

    @property
    def _columns(self) -> list[np.ndarray]:
        return [self._host_token_ids, self._host_positions, self.host_seq_lens, *self._host_slots]


class HostGraphInputs(GraphInputs):
    """Where the device's memory is the host's: the arrays are the tensors."""

    def __init__(
        self, num_rows: int, block_sizes: Sequence[int], widths: Sequence[int], scratch_blocks: Sequence[int]
    ) -> None:
        super().__init__(num_rows, block_sizes, widths, scratch_blocks)
        self.token_ids, self.positions, self.seq_lens, *self.slots = map(torch.from_numpy, self._columns)
        self._host_tables = [
            np.full((num_rows, width), block, np.int32) for width, block in zip(widths, scratch_blocks)
        ]
        self.tables = [torch.from_numpy(table) for table in self._host_tables]

    def clear(self) -> None:
        self._fill_columns(None)
        for table, block in zip(self._host_tables, self._scratch_blocks):
            table.fill(block)

    def fill(self, step: HostStep, num_rows: int) -> StepRows:
        self._fill_columns(step)
        n = step.num_reqs
        for table, group, block in zip(self._host_tables, step.groups, self._scratch_blocks):
            table[:n, : group.block_table.shape[1]] = group.block_table
            table[n:num_rows, 0] = block
        rows = (step.unknown_rows, step.unknown_tokens, step.sample_rows)
        return StepRows(*map(torch.from_numpy, rows))


class StagedGraphInputs(GraphInputs):
    """In memory of the device's own, which one copy fills for each step."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        num_rows: int,
        block_sizes: Sequence[int],
        widths: Sequence[int],
        scratch_blocks: Sequence[int],
    ) -> None:
        super().__init__(num_rows, block_sizes, widths, scratch_blocks)
        self._staging = StagingBuffer(runtime, _staging_bytes(num_rows, widths))
        self.token_ids, self.positions, self.seq_lens, *self.slots = self._staging.copy(self._columns)
        self.tables = [
            torch.full((num_rows, width), block, dtype=torch.int32, device=runtime.torch_device)
            for width, block in zip(widths, scratch_blocks)
        ]

    def clear(self) -> None:
        self._fill_columns(None)
        self._staging.copy(self._columns)
        for table, block in zip(self.tables, self._scratch_blocks):
            table.fill_(block)

    def fill(self, step: HostStep, num_rows: int) -> StepRows:
        self._fill_columns(step)
        columns, tables = self._columns, self._padded_tables(step, num_rows)
        rows = (step.unknown_rows, step.unknown_tokens, step.sample_rows)
        staged = self._staging.copy([*columns, *tables, *rows])
        for table, filled in zip(self.tables, staged[len(columns) :]):
            table[:num_rows, : filled.shape[1]].copy_(filled)
        return StepRows(*staged[-len(rows) :])

    def _padded_tables(self, step: HostStep, num_rows: int) -> list[np.ndarray]:
        """As wide as the step needs."""
        tables = []
        for group, scratch_block in zip(step.groups, self._scratch_blocks):
            table = np.full((num_rows, group.block_table.shape[1]), scratch_block, np.int32)
            table[: step.num_reqs] = group.block_table
            tables.append(table)
        return tables


def _staging_bytes(num_rows: int, widths: Sequence[int]) -> int:
    """The persistent columns must not move, so the buffer is made as large as it can get."""
    columns = num_rows * (8 + 8 + 4 + 8 * len(widths))
    tables = sum(4 * num_rows * width for width in widths)
    rows = 3 * 8 * num_rows
    return columns + tables + rows + ALIGNMENT_BYTES * (3 + 2 * len(widths) + 3)
