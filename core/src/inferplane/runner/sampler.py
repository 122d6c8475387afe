"""`Sampler`: from rows of logits to one token for each request, every request by its own settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import torch

from inferplane.api.ops import best_token, draw_token
from inferplane.plan import NewRequest
from inferplane.request import PositionLogprobs
from inferplane.runner.adjustments import Adjustments, apply_sparse
from inferplane.runner.draw import Settings, draw
from inferplane.runner.logprobs import pack_logprobs, unpack_logprobs
from inferplane.runner.noise import row_keys
from inferplane.runner.penalties import Penalties

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime, HostCopy

TOP_K_WIDTHS = (64, 256, 1024, 4096)
"""Candidates taken for a top_k, so that a request which wants few does not pay for one that wants many."""

HOST_SLICE_ELEMENTS = 1 << 22
DEVICE_SLICE_ELEMENTS = 1 << 25


def slice_elements(is_host_memory: bool) -> int:
    """Logits handled at once: in host memory few enough that temporaries are reused instead of mapped anew (on 64 ×
    49,152 logits that was a factor of 5), elsewhere only so many that memory stays bounded."""
    return HOST_SLICE_ELEMENTS if is_host_memory else DEVICE_SLICE_ELEMENTS


class Method(IntEnum):
    GREEDY = 0
    PLAIN = 1
    TOP_P = 2
    TOP_K = 3


class Outcome(IntEnum):
    """Of the choice in one row of logits."""

    TOKEN = 0
    NOT_FINITE = 1
    """The model's own logits leave nothing to choose."""
    NOTHING_LEFT = 2


_WHAT_IS_WRONG = {
    Outcome.NOT_FINITE: "the model's logits are not finite numbers; a wider dtype may help",
    Outcome.NOTHING_LEFT: "no token is left to choose: logit_bias, allowed_token_ids, bad_words and min_tokens ban "
    "all of them",
}


@dataclass(frozen=True)
class Choices:
    """`Sampled`, in host memory."""

    token_ids: np.ndarray
    """[n] int64; of no meaning where there is an error."""
    logprobs: dict[int, PositionLogprobs]
    errors: dict[int, str]


@dataclass
class Sampled:
    """Of n rows of logits, by their index. What lies on the device may not be computed yet."""

    choices: torch.Tensor
    """[2, n] int64 on the device: tokens, each of the vocabulary even where there is an error, and `Outcome`s."""
    logprobs: list[tuple[np.ndarray, np.ndarray, torch.Tensor]]
    """Indices, numbers of best tokens, and what `pack_logprobs` made of these rows, on the device."""
    errors: dict[int, str] = field(default_factory=dict)
    """Those that the host knows of: of logits processors."""

    @property
    def token_ids(self) -> torch.Tensor:
        """[n] int64 on the device."""
        return self.choices[0]

    def start_reading(self, runtime: DeviceRuntime) -> Reading:
        """Queues the copies to the host."""
        logprobs = [(at, num_top, runtime.to_host_async(packed)) for at, num_top, packed in self.logprobs]
        return Reading(runtime.to_host_async(self.choices), logprobs, self.errors)


@dataclass(frozen=True)
class Reading:
    """`Sampled`, on its way to host memory."""

    choices: HostCopy
    logprobs: list[tuple[np.ndarray, np.ndarray, HostCopy]]
    errors: dict[int, str]

    def read(self) -> Choices:
        """Waits for the device."""
        token_ids, outcomes = self.choices.tensor().numpy()
        errors = {int(index): _WHAT_IS_WRONG[Outcome(outcomes[index])] for index in np.flatnonzero(outcomes)}
        logprobs: dict[int, PositionLogprobs] = {}
        for at, num_top, packed in self.logprobs:
            logprobs.update(zip(at.tolist(), unpack_logprobs(packed.tensor(), num_top)))
        return Choices(token_ids, logprobs, errors | self.errors)


class Sampler:
    """Keeps the settings of each batch row, and what penalties count. `add` and `remove` follow the batch."""

    def __init__(
        self,
        max_num_reqs: int,
        vocab_size: int,
        runtime: DeviceRuntime,
        processors: Callable[[], Mapping[str, str]] = dict,
        best_token: Callable[[torch.Tensor], torch.Tensor] = best_token,
        draw_token: Callable[..., torch.Tensor] = draw_token,
    ) -> None:
        """``processors``: the named logits processors of the installed plugins, asked for when a request names one.
        ``best_token`` and ``draw_token``: the ops of these names."""
        self._vocab_size = vocab_size
        self._runtime = runtime
        self._processors = processors
        self._best_token = best_token
        self._draw_token = draw_token
        self.rows_per_slice = max(1, slice_elements(runtime.is_host_memory) // vocab_size)
        self._kind = np.zeros(max_num_reqs, np.int64)
        """What must be equal for two rows to be sampled by the same calls: see `_kind_of`."""
        self._temperature = np.ones(max_num_reqs, np.float32)
        self._top_k = np.zeros(max_num_reqs, np.int32)
        self._top_p = np.ones(max_num_reqs, np.float32)
        self._min_p = np.zeros(max_num_reqs, np.float32)
        self._seed = np.zeros(max_num_reqs, np.uint64)
        self._wants_logprobs = np.zeros(max_num_reqs, bool)
        self._num_logprobs = np.zeros(max_num_reqs, np.int64)
        self._adjustments: dict[int, Adjustments] = {}
        self._penalties = Penalties(max_num_reqs, runtime)

    def add(self, row: int, request: NewRequest, tokens: np.ndarray) -> str | None:
        """Takes in a request whose ``tokens`` (prompt and output so far) are known. Returns what is wrong with it."""
        params = request.params
        prompt, output = tokens[: request.num_prompt_tokens], tokens[request.num_prompt_tokens :]
        self.remove(row)
        error = None
        if Adjustments.are_wanted(request):
            try:
                named = self._processors() if params.logits_processors else {}
                self._adjustments[row] = Adjustments(request, prompt, self._vocab_size, named)
            except (
                Exception
            ) as raised:  # a plugin's factory may raise anything, and it is this request's affair alone
                error = _describe(raised)
        self._penalties.add(row, params, prompt, output)
        self._temperature[row] = 1.0 if params.is_greedy else params.temperature
        self._top_k[row] = min(params.top_k or self._vocab_size, self._vocab_size)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = request.seed % 2**64
        self._wants_logprobs[row] = params.logprobs is not None
        self._num_logprobs[row] = params.logprobs or 0
        self._kind[row] = self._kind_of(row, params.is_greedy)
        return error

    def remove(self, row: int) -> None:
        self._adjustments.pop(row, None)
        self._penalties.remove(row)

    def sample(
        self,
        rows: np.ndarray,
        positions: np.ndarray,
        outputs: Callable[[int], np.ndarray],
        logits: torch.Tensor,
    ) -> Sampled:
        """Chooses the next token of each of the batch rows, of which there is at least one, and counts it.

        ``positions``: how many output tokens each row has so far, and ``outputs(row)`` gives them; ``logits:
        [len(rows), vocab_size]`` any float dtype, not changed.
        """
        kinds = self._kind[rows]
        errors: dict[int, str] = {}
        choices = (
            self._choose(kinds, rows, positions, outputs, logits, errors)
            if kinds.any()
            else self._best_token(logits)
        )
        return Sampled(choices, self._logprobs(rows, logits, choices[0]), errors)

    def _choose(
        self,
        kinds: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        outputs: Callable[[int], np.ndarray],
        logits: torch.Tensor,
        errors: dict[int, str],
    ) -> torch.Tensor:
        """``[2, n]`` int64 tokens and `Outcome`s, whatever the rows' settings."""
        order, parts = [], []
        for kind in np.unique(kinds).tolist():
            for at in self._slices(np.flatnonzero(kinds == kind)):
                part = _take_rows(logits, at, self._runtime)
                if kind & 1:
                    choices = self._adjust_and_draw(part, kind, at, rows[at], positions[at], outputs, errors)
                else:
                    choices = self._draw(part, kind, rows[at], positions[at])
                order.append(at)
                parts.append(choices)
        if len(parts) == 1:  # of all rows, then, in their order
            return parts[0]
        places = np.argsort(np.concatenate(order))
        return torch.cat(parts, dim=1).index_select(1, self._runtime.to_device(torch.from_numpy(places)))

    def _kind_of(self, row: int, is_greedy: bool) -> int:
        """A number made of the method, the width of a top_k, and (lowest bit) whether logits are adjusted: 0 where the
        most likely token is all that is wanted."""
        width = 0
        if is_greedy:
            method = Method.GREEDY
        elif self._top_k[row] < self._vocab_size:
            method = Method.TOP_K
            widths = (each for each in TOP_K_WIDTHS if self._top_k[row] <= each < self._vocab_size)
            width = next(widths, self._vocab_size)
        else:
            method = Method.TOP_P if self._top_p[row] < 1.0 else Method.PLAIN
        is_adjusted = row in self._adjustments or bool(self._penalties.is_wanted[row])
        return (width << 3) | (method << 1) | is_adjusted

    def _draw(self, logits: torch.Tensor, kind: int, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """``[2, n]`` int64 tokens and `Outcome`s, the latter as if these logits were the model's."""
        if (kind >> 1) & 3 == Method.GREEDY:
            return self._best_token(logits)
        keys = row_keys(self._seed[rows], positions)
        settings = Settings(
            self._temperature[rows], self._top_k[rows], self._top_p[rows], self._min_p[rows], keys
        )
        return draw(logits, settings, kind >> 3, self._runtime, self._draw_token).choices

    def _adjust_and_draw(
        self,
        given: torch.Tensor,
        kind: int,
        at: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray,
        outputs: Callable[[int], np.ndarray],
        errors: dict[int, str],
    ) -> torch.Tensor:
        """As `_draw`. A processor that raises is an error of its own request, whose token then means nothing."""
        logits = given.to(torch.float32, copy=True)
        changes = [
            (index, self._adjustments[row], outputs(row))
            for index, row in enumerate(rows.tolist())
            if row in self._adjustments
        ]
        for index, each, output in changes:
            if each.processors:
                try:
                    logits[index] = each.run_processors(logits[index].clone(), output)
                except Exception as raised:
                    errors[int(at[index])] = _describe(raised)
        apply_sparse(logits, changes, self._runtime)
        penalised = self._penalties.of(rows)
        if penalised is not None:
            penalised.apply(logits)
        choices = self._draw(logits, kind, rows, positions)
        if penalised is not None:
            penalised.append(choices[0])
        choices[1] *= _what_is_missing(given)
        return choices

    def _logprobs(
        self, rows: np.ndarray, logits: torch.Tensor, token_ids: torch.Tensor
    ) -> list[tuple[np.ndarray, np.ndarray, torch.Tensor]]:
        return [
            (
                at,
                self._num_logprobs[rows[at]],
                pack_logprobs(
                    _take_rows(logits, at, self._runtime), _take_rows(token_ids, at, self._runtime)
                ),
            )
            for at in self._slices(np.flatnonzero(self._wants_logprobs[rows]))
        ]

    def _slices(self, at: np.ndarray) -> Iterator[np.ndarray]:
        for start in range(0, len(at), self.rows_per_slice):
            yield at[start : start + self.rows_per_slice]


def _what_is_missing(given: torch.Tensor) -> torch.Tensor:
    """[n] `Outcome`s of rows that leave nothing to choose once adjusted. ``given``: the model's logits."""
    # a maximum is finite unless the row has something that is not a number, or nothing above negative infinity
    return torch.where(given.amax(1).isfinite(), Outcome.NOTHING_LEFT, Outcome.NOT_FINITE)


def _take_rows(rows: torch.Tensor, at: np.ndarray, runtime: DeviceRuntime) -> torch.Tensor:
    """Rows ``at`` (ascending) along the first dimension: a view where they lie together, else a copy."""
    start, end = int(at[0]), int(at[-1]) + 1
    if end - start == len(at):
        return rows[start:end]
    return rows.index_select(0, runtime.to_device(torch.from_numpy(at)))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
