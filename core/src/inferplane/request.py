"""What a caller asks for: sampling parameters and the request that carries them to the engine.

Free of torch, so that the front end, the scheduler and the tests stay light. Everything here crosses
processes as msgpack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

MAX_SEED = 2**63 - 1
MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024
BAN_BIAS = -100.0
"""A ``logit_bias`` that bans instead of making less likely, as callers of the OpenAI API expect of its lowest value."""
MAX_BAD_WORDS_CHARS = 65536
"""All of them together: each is spelt in many ways before the request starts, and looked for after every token."""
MIN_REPETITION_PENALTY = 0.01
"""Divides logits: far below this one they overflow."""
MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-3
"""Temperatures under this one are greedy: a draw could only overflow, or choose between logits that half precision has
rounded to the same number, where greedy takes the first."""


class ParameterError(ValueError):
    """A sampling parameter out of range. ``param`` is the name of the field, for the API's error body."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose the tokens of one request. Names and meanings are those of the field.

    Raises `ParameterError` naming the field for any value out of range.
    """

    n: int = 1
    """Number of completions of the prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 (and -1, which callers of other servers send) keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output, as in the CTRL paper (arXiv:1909.05858)."""
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    """No end of sequence and no stop token before this many output tokens."""
    max_tokens: int | None = 16
    """None: as many as the context has room for."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log-probabilities of this many best tokens (and of the chosen one) for each output token."""
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    """Added to the logits before every other setting but `logits_processors`; -100 bans a token."""
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    logits_processors: dict[str, Any] | None = None
    """Processors that plugins contribute, by name, each with its argument."""

    def __post_init__(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        _check_strings("stop", stop, MAX_STOP_STRINGS)
        msgspec.structs.force_setattr(self, "stop", list(stop))
        if self.top_k == -1:
            msgspec.structs.force_setattr(self, "top_k", 0)
        if isinstance(self.temperature, (int, float)) and 0 < self.temperature < MIN_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", 0.0)
        _check_integer("n", self.n, 1, MAX_N)
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_excluded=True)
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
        _check_integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _check_integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 0, 2**63 - 1)
            if self.min_tokens > self.max_tokens:
                raise ParameterError(
                    "min_tokens", f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})"
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_integer(name, value, 0, MAX_LOGPROBS)
        _check_strings("bad_words", self.bad_words or [], 1024)
        num_chars = sum(map(len, self.bad_words or []))
        if num_chars > MAX_BAD_WORDS_CHARS:
            raise ParameterError(
                "bad_words",
                f"bad_words has {num_chars} characters in all, at most {MAX_BAD_WORDS_CHARS} are allowed",
            )
        if len(self.logit_bias or {}) > MAX_LOGIT_BIAS:
            raise ParameterError(
                "logit_bias",
                f"logit_bias has {len(self.logit_bias or {})} entries, at most {MAX_LOGIT_BIAS} are allowed",
            )
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            _check_token_ids(name, getattr(self, name) or ())
        for token_id, bias in (self.logit_bias or {}).items():
            _check_number(f"logit_bias[{token_id}]", bias, -100.0, 100.0, param="logit_bias")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ParameterError(
                "allowed_token_ids", "allowed_token_ids is empty: it would allow no token at all"
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise ParameterError(name, f"{name} must be true or false, got {value!r}")
        if not isinstance(self.logits_processors, dict | None):
            raise ParameterError(
                "logits_processors",
                f"logits_processors maps names to arguments, got {self.logits_processors!r}",
            )

    @property
    def banned_token_ids(self) -> list[int]:
        """Those that ``logit_bias`` bans."""
        return [token_id for token_id, bias in (self.logit_bias or {}).items() if bias <= BAN_BIAS]

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses token ids that the model does not have. Raises `ParameterError`."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token_id in getattr(self, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise ParameterError(
                        name,
                        f"{name} names token {token_id}, but the vocabulary has tokens 0 to {vocab_size - 1}",
                    )


class PoolingTask(StrEnum):
    """What is to come of a whole prompt, in place of further tokens."""

    EMBED = "embed"
    """One vector."""
    CLASSIFY = "classify"
    """A number for each class."""
    SCORE = "score"
    """One number for a pair of texts."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What to make of the hidden states of one request. Raises `ParameterError` naming the field at fault."""

    task: PoolingTask = PoolingTask.EMBED
    normalize: bool | None = None
    """Embeddings of length 1; None: as the model was made to be used."""
    dimensions: int | None = None
    """Only so many leading numbers of an embedding, where the model was trained for that (arXiv:2205.13147)."""
    use_activation: bool = True
    """Whether class logits become probabilities, as the model's configuration says."""

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            _check_integer("dimensions", self.dimensions, 1, 2**31 - 1)
        for name, none in (("normalize", True), ("use_activation", False)):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (none and value is None):
                raise ParameterError(name, f"{name} must be true or false, got {value!r}")


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to complete, as the engine core receives it: tokens in, nothing left to look up.

    A caller's request with ``n`` > 1 becomes n of these, each with ``params.n`` of 1 and its own seed.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """``params.max_tokens`` cut to the room that the context leaves; may be 0 (score the prompt only)."""
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    priority: int = 0
    """Lower runs first under the priority policy; ignored under fcfs."""
    arrival_time_s: float = 0.0
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    pooling: PoolingParams | None = None
    """What to make of the whole prompt; then ``max_tokens`` is 0."""
    second_text_start: int | None = None
    """Of a pair of texts in one prompt, the first token of the second."""

    @property
    def reads_its_output(self) -> bool:
        """Whether the host looks at earlier output tokens to choose the next: it compares them with ``bad_words`` of
        several tokens, and processors may do anything."""
        return bool(self.params.logits_processors) or any(len(word) > 1 for word in self.bad_words_token_ids)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    """Natural logarithm; negative infinity for a banned token (the API turns it into a finite floor)."""
    rank: int
    """1 for the most likely token of the vocabulary."""


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the token that stands there, and of the best ones, best first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step added to one request."""

    request_id: str
    new_token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    """One entry for each of ``new_token_ids``, when asked for."""
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """Whole, once, when the prompt is done: one entry for each prompt token, None for the first."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The end-of-sequence or stop token that ended the request, when one did."""
    error: str | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    pooled: bytes | None = None
    """What was asked for with ``pooling``: numbers in float32, the lowest byte first."""


def _check_number(
    name: str, value: object, low: float, high: float, *, low_excluded: bool = False, param: str | None = None
) -> None:
    bracket = "(" if low_excluded else "["
    text = f"{name} must be a number in {bracket}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ParameterError(param or name, f"{text}, got {value!r}")
    if not math.isfinite(value) or not low <= value <= high or (low_excluded and value == low):
        raise ParameterError(param or name, f"{text}, got {value}")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"{name} must be an integer from {low} to {high}, got {value!r}")
    if not low <= value <= high:
        raise ParameterError(name, f"{name} must be from {low} to {high}, got {value}")


def _check_token_ids(name: str, token_ids: Iterable[object]) -> None:
    """Of which model they are is not known yet: see `SamplingParams.check_vocabulary`."""
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise ParameterError(name, f"{name} names tokens by integer id, got {token_id!r}")


def _check_strings(name: str, values: object, most: int) -> None:
    if not isinstance(values, list | tuple):
        raise ParameterError(name, f"{name} takes a list of strings, got {values!r}")
    if len(values) > most:
        raise ParameterError(name, f"{name} has {len(values)} entries, at most {most} are allowed")
    for value in values:
        if not value or not is_text(value):
            raise ParameterError(name, f"{name} takes non-empty strings of whole characters, got {value!r}")


def is_text(value: object) -> bool:
    """Whether ``value`` is a str that can be sent. JSON can spell halves of characters, which have no encoding."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
