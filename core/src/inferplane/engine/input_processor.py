"""`InputProcessor`: from what a caller writes to the requests that the engine core runs. Free of torch."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec

from inferplane.config import PoolerConfig
from inferplane.engine.bad_words import BadWords
from inferplane.engine.errors import EmptyPromptError, PromptTooLongError, TaskError
from inferplane.engine.pooling_input import check_pooling
from inferplane.request import (
    MAX_SEED,
    EngineRequest,
    ParameterError,
    PoolingParams,
    SamplingParams,
    is_text,
)
from inferplane.tokenizer import Tokenizer

MAX_PRIORITY = 2**31 - 1
"""Either way from 0."""


class PromptDict(TypedDict, total=False):
    """A prompt as text, as tokens, or both (then the tokens count and the text is for display)."""

    prompt: str
    prompt_token_ids: Sequence[int]
    cache_salt: str


Prompt = str | PromptDict | Sequence[int]


@dataclass(frozen=True)
class ParsedPrompt:
    """Text, token ids, or both."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None
    second_text_start: int | None = None
    """Of a pair of texts, the first token of the second."""


def parse_prompt(prompt: Prompt) -> ParsedPrompt:
    """Raises `TypeError` saying which forms there are."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown or not (text is None or isinstance(text, str)) or (text is None and ids is None):
            raise TypeError(
                "a prompt given as dict has 'prompt' (text) or 'prompt_token_ids' (a list), and may have 'cache_salt'; "
                f"got the keys {sorted(map(str, prompt))}"
            )
        return ParsedPrompt(text, None if ids is None else _whole_numbers(ids), salt)
    return ParsedPrompt(None, _whole_numbers(prompt))


def _whole_numbers(token_ids: object) -> list[int]:
    if isinstance(token_ids, list) and set(map(type, token_ids)) == {int}:
        return token_ids.copy()  # the usual form, without a look at each from Python
    if isinstance(token_ids, Sequence) or hasattr(token_ids, "__iter__"):
        try:
            if not any(isinstance(token_id, bool) for token_id in token_ids):
                return [operator.index(token_id) for token_id in token_ids]
        except TypeError:
            pass
    raise TypeError(f"token ids are a list of whole numbers, got {str(token_ids)[:80]!r}")


class InputProcessor:
    """Of one model. Everything that can be wrong with a request is found here, before the engine core sees it.

    The rule for lengths: a prompt may have up to ``max_model_len - 1`` tokens (all of them when ``max_tokens`` is 0 and
    the prompt is only scored), and ``max_tokens`` is cut to the room that the prompt leaves. None asks for all of it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        logits_processors: Collection[str] = (),
        unsupported: Mapping[str, str] | None = None,
        pooler: PoolerConfig | None = None,
    ) -> None:
        """``unsupported``: fields of `SamplingParams` that the platform does not honour, each with its reason.
        ``pooler`` is that of a model that makes vectors of prompts; None of one that generates."""
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._logits_processors = frozenset(logits_processors)
        self._unsupported = dict(unsupported or {})
        self._pooler = pooler
        self._bad_words = BadWords(tokenizer)
        self._serials = itertools.count()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. Texts of any length let other threads run meanwhile."""
        return self.tokenizer.encode_batch([text], add_special_tokens)[0]

    def encode_pair(self, first: str, second: str) -> ParsedPrompt:
        """Two texts as one prompt."""
        token_ids, start = self.tokenizer.encode_pair(first, second)
        return ParsedPrompt(None, token_ids, second_text_start=start)

    def requests(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[EngineRequest]:
        """One request for each of ``params.n`` completions, in their order. Their ids are used once and never again, so
        that a late output of a request that was dropped cannot be taken for one of a newer request of the same id.

        Raises `TaskError`, `EmptyPromptError`, `PromptTooLongError`, or `ParameterError` naming the field.
        """
        self.check_generates()
        self.check_prompt(prompt_token_ids, needs_room=params.max_tokens != 0)
        self._check_params(params)
        _check_routing(priority, cache_salt)
        room = self.max_model_len - len(prompt_token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        bad_words = self._bad_words.spellings(params.bad_words) if params.bad_words else []
        if max_tokens:
            self._check_choice(params, bad_words)
        arrival_time_s = time.time()
        serial = next(self._serials)
        return [
            EngineRequest(
                request_id=f"{request_id}/{serial}.{index}",
                prompt_token_ids=prompt_token_ids,
                params=_params_of_completion(params, index),
                max_tokens=max_tokens,
                eos_token_ids=self._eos_token_ids,
                bad_words_token_ids=bad_words,
                priority=priority,
                arrival_time_s=arrival_time_s,
                cache_salt=cache_salt,
            )
            for index in range(params.n)
        ]

    def pooling_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: PoolingParams,
        *,
        second_text_start: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EngineRequest:
        """The request for a vector of a whole prompt. Of a pair of texts the second begins at ``second_text_start``.

        Raises as `requests` does.
        """
        check_pooling(self._pooler, params)
        self.check_prompt(prompt_token_ids, needs_room=False)
        _check_routing(priority, cache_salt)
        return EngineRequest(
            request_id=f"{request_id}/{next(self._serials)}.0",
            prompt_token_ids=prompt_token_ids,
            params=_NOTHING_ASKED,
            max_tokens=0,
            priority=priority,
            arrival_time_s=time.time(),
            cache_salt=cache_salt,
            pooling=params,
            second_text_start=second_text_start,
        )

    def check_generates(self) -> None:
        """Raises `TaskError` of a model that pools."""
        if self._pooler is not None:
            raise TaskError("generate", self._pooler.tasks)

    def check_prompt(self, prompt_token_ids: Sequence[int], *, needs_room: bool = True) -> None:
        """Raises `EmptyPromptError`, `PromptTooLongError`, or `ParameterError` for an id that the model lacks."""
        if not prompt_token_ids:
            raise EmptyPromptError
        if len(prompt_token_ids) + needs_room > self.max_model_len:
            raise PromptTooLongError(len(prompt_token_ids), self.max_model_len, needs_room=needs_room)
        if strange := set(map(type, prompt_token_ids)) - {int}:
            names = ", ".join(sorted(kind.__name__ for kind in strange))
            raise ParameterError("prompt", f"the prompt's token ids must be integers, got {names}")
        for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise ParameterError(
                    "prompt",
                    f"the prompt has token id {token_id}, but the vocabulary has ids 0 to {self.vocab_size - 1}",
                )

    def _check_params(self, params: SamplingParams) -> None:
        params.check_vocabulary(self.vocab_size)
        for name, reason in self._unsupported.items():
            if getattr(params, name) != getattr(_NOTHING_ASKED, name):
                raise ParameterError(name, f"{name} cannot be served here: {reason}; leave it out")
        if unknown := (params.logits_processors or {}).keys() - self._logits_processors:
            known = ", ".join(sorted(self._logits_processors)) or "none"
            raise ParameterError(
                "logits_processors",
                f"unknown logits processors {', '.join(sorted(unknown))}; installed: {known}",
            )

    def _check_choice(self, params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> None:
        """Raises `ParameterError` when the request's own settings ban every token that could come first."""
        banned = {
            "logit_bias": set(params.banned_token_ids),
            "bad_words": {word[0] for word in bad_words if len(word) == 1},
            "min_tokens": {*self._eos_token_ids, *(params.stop_token_ids or ())}
            if params.min_tokens
            else set(),
        }
        allowed = params.allowed_token_ids
        left: Collection[int] = range(self.vocab_size) if allowed is None else set(allowed)
        if len(left) > sum(map(len, banned.values())) or not set(left) <= set().union(*banned.values()):
            return
        bans = [name for name, token_ids in banned.items() if token_ids.intersection(left)]
        named = bans[0] if allowed is None else "allowed_token_ids"
        some = "every token" if allowed is None else "every token that allowed_token_ids allows"
        raise ParameterError(named, f"no token is left to choose: {' and '.join(bans)} ban {some}")


_NOTHING_ASKED = SamplingParams()


def _check_routing(priority: object, cache_salt: object) -> None:
    """What no message to the engine could carry. Raises `ParameterError`."""
    is_whole = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_whole or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:  # type: ignore[operator]
        raise ParameterError(
            "priority",
            f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority!r}",
        )
    if cache_salt is not None and not is_text(cache_salt):
        raise ParameterError(
            "cache_salt", f"cache_salt must be a text of whole characters, got {cache_salt!r}"
        )


def _params_of_completion(params: SamplingParams, index: int) -> SamplingParams:
    if params.n == 1:
        return params
    changes: dict[str, Any] = {"n": 1}
    if params.seed is not None and index:
        # distinct streams of random numbers, and the same ones again for the same seed
        changes["seed"] = params.seed + index if params.seed <= MAX_SEED - index else params.seed - index
    if index:
        changes["prompt_logprobs"] = None  # alike for all, so the first one tells
    return msgspec.structs.replace(params, **changes)
