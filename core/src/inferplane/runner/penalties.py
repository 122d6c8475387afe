"""Repetition, frequency and presence penalties, over token counts that lie where the logits are.

A token is counted by the device that has sampled it, so that the next one can be chosen before the host knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from inferplane.request import SamplingParams

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime

MIN_ROOM = 64
"""Entries for which a row has room at least when it moves, on top of as many as it has."""


@dataclass(frozen=True)
class Entries:
    """Those of m rows, as tensors on the device that were queued together."""

    places: torch.Tensor
    """[n] int64"""
    owners: torch.Tensor
    """[n] int64: to which of the m rows each belongs."""
    ids: torch.Tensor
    """[n] int64 tokens"""
    counts: torch.Tensor
    """[n] int32: how often the row's output has the token; 0 for one that only its prompt has."""
    next_places: torch.Tensor
    """[m] int64: where each row's next entry goes."""


class TokenCounts:
    """Of each row of the batch the tokens that occurred, counted, in memory of the device that all rows share.

    A row is a run of entries, of a token and its count. A token that is appended takes another entry even where it has
    one, and then all of them have the same count; so the host knows how many entries there are without knowing the
    tokens. They are few next to a vocabulary: to go through them costs what occurred.
    """

    def __init__(self, max_num_reqs: int, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._start = np.zeros(max_num_reqs, np.int64)
        self._length = np.zeros(max_num_reqs, np.int64)
        self._room = np.zeros(max_num_reqs, np.int64)
        """Entries that a row can have before it moves; 0 for one that is not counted."""
        self._end = 0
        """Everything from here on is free."""
        self._ids, self._counts = self._allocate(0)

    def add(self, row: int, prompt: np.ndarray, output: np.ndarray) -> None:
        """Counts what a request has when it enters the batch."""
        output_ids, output_counts = np.unique(output, return_counts=True)
        ids = np.concatenate([output_ids, np.setdiff1d(prompt, output_ids)]).astype(np.int64)
        counts = np.zeros(len(ids), np.int32)
        counts[: len(output_ids)] = output_counts
        room = 2 * len(ids) + MIN_ROOM
        if self._end + room > len(self._ids):
            self._move(num_more=room)
        start, end = self._end, self._end + len(ids)
        self._start[row], self._length[row], self._room[row] = start, len(ids), room
        self._end += room
        self._ids[start:end].copy_(self._to_device(ids))
        self._counts[start:end].copy_(self._to_device(counts))

    def remove(self, row: int) -> None:
        self._length[row] = self._room[row] = 0

    def entries(self, rows: np.ndarray) -> Entries:
        """Of rows that were added, which are distinct."""
        if (self._length[rows] == self._room[rows]).any():
            self._move()
        places, owners, ends = self._lay_out(self._start[rows], self._length[rows])
        ids, counts = self._ids.index_select(0, places), self._counts.index_select(0, places)
        return Entries(places, owners, ids, counts, ends)

    def append(self, rows: np.ndarray, entries: Entries, token_ids: torch.Tensor) -> None:
        """One token for each of the rows, ``[m]`` int64 on the device. ``entries``: of these rows, up to date."""
        is_again = entries.ids == token_ids.index_select(0, entries.owners)
        counts = entries.counts + is_again
        self._counts.index_copy_(0, entries.places, counts)
        of_token = torch.zeros_like(token_ids, dtype=torch.int32)
        of_token.scatter_reduce_(0, entries.owners, counts * is_again, "amax")
        self._ids.index_copy_(0, entries.next_places, token_ids)
        self._counts.index_copy_(0, entries.next_places, of_token.clamp_(min=1))
        self._length[rows] += 1

    def _move(self, num_more: int = 0) -> None:
        """All rows to new memory, in which each can grow, with place for so many entries more behind them."""
        rows = np.flatnonzero(self._room)
        length = self._length[rows]
        room = 2 * length + MIN_ROOM
        start = np.cumsum(room) - room
        end = int(room.sum())
        ids, counts = self._allocate(2 * (end + num_more))
        before, *_ = self._lay_out(self._start[rows], length)
        after, *_ = self._lay_out(start, length)
        ids.index_copy_(0, after, self._ids.index_select(0, before))
        counts.index_copy_(0, after, self._counts.index_select(0, before))
        self._ids, self._counts = ids, counts
        self._start[rows], self._room[rows], self._end = start, room, end

    def _lay_out(
        self, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``places`` and ``owners`` of `Entries`, and the place behind each row."""
        total = int(lengths.sum())
        start, length = self._to_device(np.stack((starts, lengths)))
        owners = torch.repeat_interleave(length, output_size=total)
        shift = start - (length.cumsum(0) - length)
        places = torch.arange(total, device=shift.device) + shift.index_select(0, owners)
        return places, owners, start + length

    def _allocate(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._runtime.torch_device
        return (
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(size, dtype=torch.int32, device=device),
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return self._runtime.to_device(torch.from_numpy(array))


class Penalties:
    """The penalties of each row of the batch."""

    def __init__(self, max_num_reqs: int, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._tokens = TokenCounts(max_num_reqs, runtime)
        self._settings = np.zeros((3, max_num_reqs), np.float32)
        """Repetition, frequency, presence."""
        self.is_wanted = np.zeros(max_num_reqs, bool)

    def add(self, row: int, params: SamplingParams, prompt: np.ndarray, output: np.ndarray) -> None:
        """``output``: what a preempted request had reached."""
        settings = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if settings == (1.0, 0.0, 0.0):
            return
        self._settings[:, row] = settings
        self.is_wanted[row] = True
        # only the repetition penalty looks at the prompt
        self._tokens.add(row, prompt if params.repetition_penalty != 1.0 else prompt[:0], output)

    def remove(self, row: int) -> None:
        self.is_wanted[row] = False
        self._tokens.remove(row)

    def of(self, rows: np.ndarray) -> PenalisedRows | None:
        """For the next token of these rows; None where none of them has penalties."""
        at = np.flatnonzero(self.is_wanted[rows])
        if not len(at):
            return None
        rows = rows[at]
        to_device = self._runtime.to_device
        return PenalisedRows(
            self._tokens,
            rows,
            self._tokens.entries(rows),
            to_device(torch.from_numpy(at)),
            to_device(torch.from_numpy(self._settings[:, rows])),
        )


@dataclass(frozen=True)
class PenalisedRows:
    """Those with penalties among some rows of the batch, at one step."""

    tokens: TokenCounts
    rows: np.ndarray
    entries: Entries
    at: torch.Tensor
    """[m] int64 on the device: which of the rows they are."""
    settings: torch.Tensor
    """[3, m] float32 on the device: repetition, frequency, presence."""

    def apply(self, logits: torch.Tensor) -> None:
        """In place. ``logits: [num_rows, vocab_size]`` float32, contiguous."""
        entries = self.entries
        repetition, frequency, presence = self.settings.index_select(1, entries.owners)
        index = self.at.index_select(0, entries.owners) * logits.shape[1] + entries.ids
        flat = logits.view(-1)
        values = flat.index_select(0, index)
        values = torch.where(values > 0, values / repetition, values * repetition)
        loss = frequency * entries.counts + presence * (entries.counts > 0)
        flat.index_copy_(0, index, values - loss)  # entries of the same token write the same

    def append(self, token_ids: torch.Tensor) -> None:
        """Counts the tokens that were chosen: ``[num_rows]`` int64 on the device."""
        self.tokens.append(self.rows, self.entries, token_ids.index_select(0, self.at))
