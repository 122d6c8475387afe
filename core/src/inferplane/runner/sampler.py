"""`Sampler`: from rows of logits to one token for each request, every request by its own settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch

from inferplane.plan import NewRequest
from inferplane.request import PositionLogprobs
from inferplane.runner.adjustments import Adjustments, apply_sparse
from inferplane.runner.draw import Drawn, Settings, draw, draw_top_k, draw_top_p, take_best
from inferplane.runner.logprobs import position_logprobs
from inferplane.runner.uniforms import uniforms

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime

TOP_K_WIDTHS = (64, 256, 1024, 4096)
"""Candidates taken for a top_k; a request's own setting picks the width, so that it takes one path in any batch."""

TIES_ALLOWED_FOR = 14
"""Candidates beyond top_k, so that logits of few mantissa bits, which tie often, rarely need the whole row."""

HOST_SLICE_ELEMENTS = 1 << 22
DEVICE_SLICE_ELEMENTS = 1 << 26
"""Logits handled at once: in host memory few enough that temporaries are reused instead of mapped anew (on 64 × 49,152
logits that was a factor of 5), elsewhere only so many that memory stays bounded."""


class Method(IntEnum):
    GREEDY = 0
    PLAIN = 1
    TOP_P = 2
    TOP_K = 3


@dataclass
class Sampled:
    """Of n rows of logits, by their index."""

    token_ids: np.ndarray
    """[n] int64; of no meaning where there is an error."""
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Keeps the settings of each batch row. `add` and `remove` follow the batch; `append` tells it of its tokens."""

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        runtime: DeviceRuntime,
        processors: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """``processors``: the named logits processors of the installed plugins, asked for when a request names one."""
        self._vocab_size = vocab_size
        self._runtime = runtime
        self._processors = processors
        size = HOST_SLICE_ELEMENTS if runtime.is_host_memory else DEVICE_SLICE_ELEMENTS
        self.rows_per_slice = max(1, size // vocab_size)
        self._kind = np.zeros(max_num_reqs, np.int64)
        """What must be equal for two rows to be sampled by the same calls: see `_kind_of`."""
        self._temperature = np.ones(max_num_reqs, np.float32)
        self._top_k = np.zeros(max_num_reqs, np.int64)
        self._top_p = np.ones(max_num_reqs, np.float64)
        self._min_p = np.zeros(max_num_reqs, np.float64)
        self._seed = np.zeros(max_num_reqs, np.uint64)
        self._wants_logprobs = np.zeros(max_num_reqs, bool)
        self._num_logprobs = np.zeros(max_num_reqs, np.int64)
        self._adjustments: dict[int, Adjustments] = {}

    def add(self, row: int, request: NewRequest, tokens: np.ndarray) -> str | None:
        """Takes in a request whose ``tokens`` (prompt and output so far) are known. Returns what is wrong with it."""
        params = request.params
        self.remove(row)
        error = None
        if Adjustments.are_wanted(request):
            try:
                named = self._processors() if params.logits_processors else {}
                self._adjustments[row] = Adjustments(request, tokens, self._vocab_size, named)
            except (
                Exception
            ) as raised:  # a plugin's factory may raise anything, and it is this request's affair alone
                error = _describe(raised)
        self._temperature[row] = 1.0 if params.is_greedy else params.temperature
        self._top_k[row] = params.top_k or self._vocab_size
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = request.seed % 2**64
        self._wants_logprobs[row] = params.logprobs is not None
        self._num_logprobs[row] = params.logprobs or 0
        self._kind[row] = self._kind_of(row, params.is_greedy)
        return error

    def remove(self, row: int) -> None:
        self._adjustments.pop(row, None)

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """A token was chosen for each of the rows."""
        if not self._adjustments:
            return
        for row, token_id in zip(rows.tolist(), token_ids.tolist()):
            adjustments = self._adjustments.get(row)
            if adjustments is not None and adjustments.penalties is not None:
                adjustments.penalties.counts.append(token_id)

    def sample(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        outputs: Callable[[int], np.ndarray],
        logits: torch.Tensor,
    ) -> Sampled:
        """Chooses a token for each of the batch rows.

        ``positions``: how many output tokens each row has so far, and ``outputs(row)`` gives them; ``logits:
        [len(rows), vocab_size]`` any float dtype, not changed.
        """
        sampled = Sampled(np.zeros(len(rows), np.int64))
        uniform = uniforms(self._seed[rows], positions)
        kinds = self._kind[rows]
        for kind in np.unique(kinds).tolist():
            for at in self._slices(np.flatnonzero(kinds == kind)):
                part = _take_rows(logits, at, self._runtime)
                if kind & 1:
                    part = part.to(torch.float32, copy=True)
                    self._adjust(part, at, rows[at], outputs, sampled.errors)
                drawn = self._draw(part, kind, rows[at], uniform[at])
                sampled.token_ids[at] = drawn.token_ids
                for index in at[~drawn.is_valid].tolist():
                    sampled.errors.setdefault(index, _why_nothing_to_choose(logits[index]))
        self._add_logprobs(rows, logits, sampled)
        return sampled

    def _kind_of(self, row: int, is_greedy: bool) -> int:
        """A number made of the method, the width of a top_k, and (lowest bit) whether logits are adjusted."""
        width = 0
        if is_greedy:
            method = Method.GREEDY
        elif self._top_k[row] < self._vocab_size:
            method = Method.TOP_K
            needed = self._top_k[row] + TIES_ALLOWED_FOR
            width = next((w for w in TOP_K_WIDTHS if needed <= w < self._vocab_size), self._vocab_size)
        else:
            method = Method.TOP_P if self._top_p[row] < 1.0 else Method.PLAIN
        return (width << 3) | (method << 1) | (row in self._adjustments)

    def _draw(self, logits: torch.Tensor, kind: int, rows: np.ndarray, uniform: np.ndarray) -> Drawn:
        method, width, runtime = (kind >> 1) & 3, kind >> 3, self._runtime
        if method == Method.GREEDY:
            return take_best(logits, runtime)
        settings = Settings(
            self._temperature[rows], self._top_k[rows], self._top_p[rows], self._min_p[rows], uniform
        )
        logits = logits.float()
        if method == Method.TOP_K:
            return draw_top_k(logits, settings, width, runtime)
        return (draw_top_p if method == Method.TOP_P else draw)(logits, settings, runtime)

    def _adjust(
        self,
        logits: torch.Tensor,
        at: np.ndarray,
        rows: np.ndarray,
        outputs: Callable[[int], np.ndarray],
        errors: dict[int, str],
    ) -> None:
        """In place; a processor that raises is an error of its own request, whose token then means nothing."""
        adjustments = [self._adjustments[row] for row in rows.tolist()]
        histories = [outputs(row) for row in rows.tolist()]
        for index, (each, history) in enumerate(zip(adjustments, histories)):
            if each.processors:
                try:
                    logits[index] = each.run_processors(logits[index].clone(), history)
                except Exception as raised:
                    errors[int(at[index])] = _describe(raised)
        apply_sparse(logits, adjustments, histories, self._runtime)

    def _add_logprobs(self, rows: np.ndarray, logits: torch.Tensor, sampled: Sampled) -> None:
        for at in self._slices(np.flatnonzero(self._wants_logprobs[rows])):
            part = _take_rows(logits, at, self._runtime)
            entries = position_logprobs(
                part, sampled.token_ids[at], self._num_logprobs[rows[at]], self._runtime
            )
            sampled.logprobs.update(zip(at.tolist(), entries))

    def _slices(self, at: np.ndarray) -> Iterator[np.ndarray]:
        for start in range(0, len(at), self.rows_per_slice):
            yield at[start : start + self.rows_per_slice]


def _take_rows(logits: torch.Tensor, at: np.ndarray, runtime: DeviceRuntime) -> torch.Tensor:
    """Rows ``at`` (ascending): a view where they lie together, else a copy."""
    start, end = int(at[0]), int(at[-1]) + 1
    if end - start == len(at):
        return logits[start:end]
    return logits.index_select(0, runtime.to_device(torch.from_numpy(at)))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _why_nothing_to_choose(logits: torch.Tensor) -> str:
    if not logits.isfinite().any() or logits.isnan().any():
        return "the model's logits are not finite numbers; a wider dtype may help"
    return (
        "no token is left to choose: logit_bias, allowed_token_ids, bad_words and min_tokens ban all of them"
    )
