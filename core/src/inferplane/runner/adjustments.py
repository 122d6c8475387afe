"""Changes to a request's logits before the choice: processors, bias, bans.

They apply in this order: the request's own logits processors, ``logit_bias``, ``allowed_token_ids``, ``bad_words``,
``min_tokens``; then come the penalties. All but the first are sparse, so those of many requests are gathered on the
host and applied to a whole slice of logits at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import numpy as np
import torch

from inferplane.plan import NewRequest
from inferplane.request import BAN_BIAS

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime
    from inferplane.api.hookspecs import LogitsProcessor


class Adjustments:
    """Those of one request, made when it enters the batch."""

    def __init__(
        self, request: NewRequest, prompt: np.ndarray, vocab_size: int, processors: Mapping[str, str]
    ) -> None:
        """``prompt``: its tokens. ``processors``: ``"module:factory"`` by name.

        Raises `ValueError` for a processor that does not exist or refuses its argument; anything else that a
        processor's factory raises goes through.
        """
        params = request.params
        bias = params.logit_bias or {}
        kept = {token_id: value for token_id, value in bias.items() if value > BAN_BIAS}
        self.bias_ids = np.fromiter(kept.keys(), np.int64, len(kept))
        self.bias_values = np.fromiter(kept.values(), np.float32, len(kept))
        self.banned_ids = np.array(params.banned_token_ids, np.int64)
        self.allowed_ids: np.ndarray | None = None
        if params.allowed_token_ids is not None:
            self.allowed_ids = np.unique(np.array(params.allowed_token_ids, np.int64))
        # Tokenizers may know ids beyond the model's vocabulary. They are never chosen; and the place of one among the
        # logits, where the rows of all requests lie one after another, is in the next request's row.
        bad_words = (tuple(word) for word in request.bad_words_token_ids if word)
        self._bad_words = [word for word in bad_words if max(word) < vocab_size]
        self._longest_prefix = max((len(word) - 1 for word in self._bad_words), default=0)
        self._min_tokens = params.min_tokens
        stop_ids = {*request.eos_token_ids, *(params.stop_token_ids or ())}
        self._stop_ids = np.array([stop_id for stop_id in stop_ids if stop_id < vocab_size], np.int64)
        self.processors = [
            _make_processor(name, argument, processors, prompt, vocab_size)
            for name, argument in (params.logits_processors or {}).items()
        ]

    @staticmethod
    def are_wanted(request: NewRequest) -> bool:
        params = request.params
        return bool(
            params.logit_bias
            or params.allowed_token_ids is not None
            or request.bad_words_token_ids
            or params.min_tokens
            or params.logits_processors
        )

    def bans_now(self, output: np.ndarray) -> list[np.ndarray]:
        """Ids of the tokens that may not follow ``output``, in any order and possibly repeated."""
        bans = [self.banned_ids]
        if len(output) < self._min_tokens:
            bans.append(self._stop_ids)
        if self._bad_words:
            tail = tuple(output[len(output) - min(self._longest_prefix, len(output)) :].tolist())
            # only the token that would complete a word is banned, and only after the rest of it
            completing = [
                word[-1] for word in self._bad_words if len(word) == 1 or tail[1 - len(word) :] == word[:-1]
            ]
            bans.append(np.array(completing, np.int64))
        return bans

    def run_processors(self, logits: torch.Tensor, output: np.ndarray) -> torch.Tensor:
        """``logits: [vocab_size]`` float32, which may be changed. What a processor raises goes through."""
        for processor in self.processors:
            result = processor(output.tolist(), logits)
            if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
                shape = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
                raise ValueError(
                    f"a logits processor returned {shape} instead of logits of shape {list(logits.shape)}"
                )
            logits = result.to(logits)
        return logits


def apply_sparse(
    logits: torch.Tensor, changes: Sequence[tuple[int, Adjustments, np.ndarray]], runtime: DeviceRuntime
) -> None:
    """Everything but the processors, in place. ``logits: [n, vocab_size]`` float32; ``changes``: a row of these, what
    to do there, and the output so far."""
    vocab_size = logits.shape[1]
    flat = logits.view(-1)

    def to_device(parts: list[np.ndarray]) -> torch.Tensor:
        return runtime.to_device(torch.from_numpy(np.concatenate(parts)))

    biased = [(row * vocab_size, each) for row, each, _ in changes if len(each.bias_ids)]
    if biased:
        index = to_device([start + each.bias_ids for start, each in biased])
        flat[index] += to_device([each.bias_values for _, each in biased])
    for row, each, _ in changes:
        if each.allowed_ids is not None:
            allowed = to_device([each.allowed_ids])
            values = logits[row, allowed]
            logits[row] = float("-inf")
            logits[row, allowed] = values
    bans = [row * vocab_size + ids for row, each, output in changes for ids in each.bans_now(output)]
    if any(map(len, bans)):
        flat[to_device(bans)] = float("-inf")


def _make_processor(
    name: str, argument: object, processors: Mapping[str, str], prompt: np.ndarray, vocab_size: int
) -> LogitsProcessor:
    if name not in processors:
        known = ", ".join(sorted(processors)) or "none"
        raise ValueError(f"logits processor {name!r} is unknown; installed plugins bring: {known}")
    return resolve_name(processors[name])(argument, prompt.tolist(), vocab_size)
