"""`Batch`: what a worker knows of each request, kept from step to step and changed by differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inferplane.plan import NewRequest


class BatchError(ValueError):
    """A plan that does not fit what the worker was told before. The message names the request."""


@dataclass(frozen=True)
class HostGroup:
    """The part of a step that differs between KV groups."""

    block_table: np.ndarray
    """[num_reqs, max_num_blocks] int32"""
    slot_mapping: np.ndarray
    """[num_tokens] int64"""


@dataclass(frozen=True)
class PromptSpan:
    """Rows of a step that predict tokens of a prompt whose log-probabilities were asked for."""

    request_id: str
    row: int
    first_token: int
    """Row of the step's tokens that predicts the first of ``token_ids``."""
    token_ids: np.ndarray
    num_top: int


@dataclass(frozen=True)
class HostStep:
    """One step in host memory, ready to be copied. Request i of the step sits in batch row ``rows[i]``."""

    rows: np.ndarray
    query_lens: np.ndarray
    query_start: np.ndarray
    """[num_reqs + 1] int32"""
    seq_lens: np.ndarray
    """[num_reqs] int32: computed tokens after the step."""
    token_ids: np.ndarray
    positions: np.ndarray
    groups: list[HostGroup]
    sample_rows: np.ndarray
    """Batch rows of the requests that get a token, in step order."""
    sample_tokens: np.ndarray
    """For each of them the row of its last token among the step's."""
    unknown_rows: np.ndarray
    """Batch rows of the requests whose last token only the device knows yet."""
    unknown_tokens: np.ndarray
    """For each of them the row of that token among the step's; its entry in ``token_ids`` means nothing."""
    prompt_spans: list[PromptSpan]

    @property
    def num_reqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def has_one_token_each(self) -> bool:
        return len(self.token_ids) == len(self.rows)


@dataclass(frozen=True)
class TokenPlaces:
    """Where tokens go that were sampled on the device: one for each of n batch rows."""

    rows: np.ndarray
    positions: np.ndarray
    serials: np.ndarray
    """Of the requests that were in the rows then; a row may have another by the time that the tokens are known."""


class Batch:
    """One row for each request that the worker has been told of; rows are reused.

    ``add``, ``remove`` and ``append_blocks`` change rows. A token that was sampled gets its place by `reserve`, and its
    value by `fill`, if that ever comes to this host. `prepare` makes a step of some rows with array operations, and
    `advance` moves those on. Nothing here loops over tokens.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, block_sizes: Sequence[int]) -> None:
        """``block_sizes``: tokens per block of each KV group, in the order of the plans' block lists."""
        self.max_num_reqs = max_num_reqs
        self.block_sizes = tuple(block_sizes)
        width = max_model_len + 1
        # zeros, not empty: the system hands out zeroed memory lazily, so only what is used is ever resident
        self.token_ids = np.zeros((max_num_reqs, width), np.int32)
        self.num_tokens = np.zeros(max_num_reqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_reqs, np.int64)
        self.num_computed = np.zeros(max_num_reqs, np.int64)
        self._samples = np.zeros(max_num_reqs, bool)
        self._num_unknown = np.zeros(max_num_reqs, np.int64)
        """Of each row's tokens the last so many have only been reserved."""
        self._serials = np.zeros(max_num_reqs, np.int64)
        """Counts the requests that were in a row."""
        self._block_tables = [np.zeros((max_num_reqs, -(-width // size)), np.int32) for size in block_sizes]
        self._num_blocks = np.zeros((len(block_sizes), max_num_reqs), np.int64)
        self._num_prompt_logprobs: dict[int, int] = {}
        """Rows that want log-probabilities of their prompt, with the number of best tokens."""
        self._row_of: dict[str, int] = {}
        self._ids: list[str] = [""] * max_num_reqs
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def row_of(self, request_id: str) -> int:
        row = self._row_of.get(request_id)
        if row is None:
            raise BatchError(f"request {request_id!r} is not in the batch")
        return row

    def request_ids(self, rows: np.ndarray) -> list[str]:
        return [self._ids[row] for row in rows.tolist()]

    def known_tokens(self, row: int) -> np.ndarray:
        """Prompt and output so far; a view."""
        return self.token_ids[row, : self.num_tokens[row]]

    def num_output_tokens(self, rows: np.ndarray) -> np.ndarray:
        return self.num_tokens[rows] - self.num_prompt_tokens[rows]

    def output_tokens(self, row: int) -> np.ndarray:
        """Output so far; a view."""
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]

    # -- differences

    def add(self, request: NewRequest) -> int:
        """Gives the request a row and returns it. Raises `BatchError` when it does not fit."""
        num_tokens = len(request.token_ids)
        if request.request_id in self._row_of:
            raise BatchError(f"request {request.request_id!r} is in the batch already")
        if not self._free_rows:
            raise BatchError(
                f"request {request.request_id!r} is one more than the {self.max_num_reqs} of the batch"
            )
        if not 0 < num_tokens < self.token_ids.shape[1]:
            raise BatchError(
                f"request {request.request_id!r} has {num_tokens} tokens, not 1 to {self.token_ids.shape[1] - 1}"
            )
        row = self._free_rows.pop()
        self._row_of[request.request_id] = row
        self._ids[row] = request.request_id
        self.token_ids[row, :num_tokens] = request.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed[row] = request.num_computed_tokens
        self._samples[row] = request.max_tokens > 0
        self._num_unknown[row] = 0
        self._num_blocks[:, row] = 0
        # With output tokens in it the request has been past its prompt before, and has reported on it.
        if request.params.prompt_logprobs is not None and num_tokens <= request.num_prompt_tokens:
            self._num_prompt_logprobs[row] = request.params.prompt_logprobs
        self._append_blocks(row, request.block_ids)
        return row

    def remove(self, request_id: str) -> int | None:
        """Frees the request's row and returns it. None for a request that is not here: the plan that should have
        brought it may have failed before it came to that."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._num_prompt_logprobs.pop(row, None)
            self._ids[row] = ""
            self._serials[row] += 1
            self._free_rows.append(row)
        return row

    def append_blocks(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        self._append_blocks(self.row_of(request_id), block_ids)

    def _append_blocks(self, row: int, block_ids: Sequence[Sequence[int]]) -> None:
        if len(block_ids) != len(self.block_sizes):
            raise BatchError(
                f"request {self._ids[row]!r} brings blocks of {len(block_ids)} KV groups, not {len(self.block_sizes)}"
            )
        for group, added in enumerate(block_ids):
            if added:
                start = self._num_blocks[group, row]
                end = start + len(added)
                if end > self._block_tables[group].shape[1]:
                    raise BatchError(
                        f"request {self._ids[row]!r} has more blocks ({end}) than its longest context needs"
                    )
                self._block_tables[group][row, start:end] = added
                self._num_blocks[group, row] = end

    def reserve(self, rows: np.ndarray) -> TokenPlaces:
        """A place for one token that was sampled for each of the rows, which are distinct."""
        places = TokenPlaces(rows, self.num_tokens[rows], self._serials[rows])
        self.num_tokens[rows] += 1
        self._num_unknown[rows] += 1
        return places

    def fill(self, places: TokenPlaces, token_ids: np.ndarray) -> None:
        """The tokens of the oldest places that are not filled. Those of requests that have left are dropped."""
        is_here = self._serials[places.rows] == places.serials
        rows = places.rows[is_here]
        self.token_ids[rows, places.positions[is_here]] = token_ids[is_here]
        self._num_unknown[rows] -= 1

    # -- steps

    def prepare(self, num_scheduled_tokens: Mapping[str, int]) -> HostStep:
        """The step that moves each named request that many tokens on. Changes nothing.

        The arrays are new in every step: a copy to the device may still be reading those of the last one.
        """
        num_reqs = len(num_scheduled_tokens)
        try:
            row_list = [self._row_of[request_id] for request_id in num_scheduled_tokens]
        except KeyError as error:
            raise BatchError(f"request {error.args[0]!r} is scheduled but not in the batch") from None
        rows = np.array(row_list, np.int64)
        query_lens = np.fromiter(num_scheduled_tokens.values(), np.int64, num_reqs)
        starts = self.num_computed[rows]
        seq_lens = starts + query_lens
        num_known = self.num_tokens[rows]
        self._check(rows, query_lens, seq_lens, num_known)

        if query_lens.max(initial=1) == 1:
            query_start = np.arange(num_reqs + 1, dtype=np.int32)
            token_rows, positions = rows, starts
        else:
            query_start = np.zeros(num_reqs + 1, np.int32)
            np.cumsum(query_lens, out=query_start[1:])
            token_rows = np.repeat(rows, query_lens)
            positions = np.arange(query_start[-1], dtype=np.int64)
            positions += np.repeat(starts - query_start[:-1], query_lens)
        is_last = seq_lens == num_known
        is_sampled = is_last & self._samples[rows]
        is_unknown = is_last & (self._num_unknown[rows] > 0)
        last_tokens = query_start[1:].astype(np.int64) - 1
        return HostStep(
            rows=rows,
            query_lens=query_lens,
            query_start=query_start,
            seq_lens=seq_lens.astype(np.int32),
            token_ids=self.token_ids[token_rows, positions].astype(np.int64),
            positions=positions,
            groups=self._prepare_groups(rows, token_rows, positions, int(seq_lens.max(initial=0))),
            sample_rows=rows[is_sampled],
            sample_tokens=last_tokens[is_sampled],
            unknown_rows=rows[is_unknown],
            unknown_tokens=last_tokens[is_unknown],
            prompt_spans=self._prompt_spans(rows, starts, seq_lens, query_start)
            if self._num_prompt_logprobs
            else [],
        )

    def advance(self, step: HostStep) -> None:
        """The step's tokens are computed."""
        self.num_computed[step.rows] = step.seq_lens

    def _check(
        self, rows: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray, num_known: np.ndarray
    ) -> None:
        is_wrong = (query_lens < 1) | (seq_lens > num_known)
        if is_wrong.any():
            index = int(is_wrong.argmax())
            raise BatchError(
                f"request {self._ids[rows[index]]!r} is scheduled for {query_lens[index]} tokens up to token "
                f"{seq_lens[index]}, but {num_known[index]} are known"
            )
        for group, size in enumerate(self.block_sizes):
            room = self._num_blocks[group, rows] * size
            if (seq_lens > room).any():
                index = int((seq_lens > room).argmax())
                raise BatchError(
                    f"request {self._ids[rows[index]]!r} is scheduled up to token {seq_lens[index]}, but its blocks "
                    f"hold {room[index]}"
                )

    def _prepare_groups(
        self, rows: np.ndarray, token_rows: np.ndarray, positions: np.ndarray, max_seq_len: int
    ) -> list[HostGroup]:
        groups = []
        for size, table in zip(self.block_sizes, self._block_tables):
            blocks, offsets = np.divmod(positions, size)
            slots = table[token_rows, blocks].astype(np.int64) * size + offsets
            groups.append(HostGroup(table[rows, : -(-max_seq_len // size)], slots))
        return groups

    def _prompt_spans(
        self, rows: np.ndarray, starts: np.ndarray, seq_lens: np.ndarray, query_start: np.ndarray
    ) -> list[PromptSpan]:
        spans = []
        for index, row in enumerate(rows.tolist()):
            if row not in self._num_prompt_logprobs:
                continue
            # the token at position p predicts the one at p + 1
            first, end = (
                int(starts[index]) + 1,
                min(int(seq_lens[index]) + 1, int(self.num_prompt_tokens[row])),
            )
            if first < end:
                token_ids = self.token_ids[row, first:end].astype(np.int64)
                num_top = self._num_prompt_logprobs[row]
                spans.append(PromptSpan(self._ids[row], row, int(query_start[index]), token_ids, num_top))
        return spans
