"""The fields of a request that say how to choose tokens, and their way into `SamplingParams`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from inferplane.request import MAX_LOGPROBS, SamplingParams
from inferplane_server.errors import invalid
from inferplane_server.protocol.base import MAX_NAME_CHARS, FreeForm, Refusal, RequestModel, neutral

NO_STRUCTURE = "output cannot be bound to a structure yet"

REFUSED_SAMPLING = {
    "use_beam_search": Refusal("there is no beam search; use n with a temperature", neutral(False)),
    "length_penalty": Refusal("it belongs to beam search", neutral(1, 1.0)),
    "early_stopping": Refusal("it belongs to beam search", neutral(False)),
    "spaces_between_special_tokens": Refusal(
        "special tokens are joined as the tokenizer says", neutral(True)
    ),
    "truncate_prompt_tokens": Refusal("a prompt is never cut silently; cut it before sending"),
    "structured_outputs": Refusal(NO_STRUCTURE),
    "guided_json": Refusal(NO_STRUCTURE),
    "guided_regex": Refusal(NO_STRUCTURE),
    "guided_choice": Refusal(NO_STRUCTURE),
    "guided_grammar": Refusal(NO_STRUCTURE),
}

# no more digits than a message to the engine carries
_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


class StreamOptions(RequestModel):
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool = False
    """One more chunk at the end, without choices, with the usage of the whole request."""
    continuous_usage_stats: bool = False
    """Running totals on every chunk; an extension."""


class SamplingFields(RequestModel):
    """Shared by completions and chat. Ranges are checked by `SamplingParams`, which knows them."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    """Each choice also names the tokens that it consists of; an extension."""
    logits_processors: FreeForm | None = None
    priority: int = 0
    cache_salt: str | None = None

    PASSED_ON: ClassVar[tuple[str, ...]] = (
        "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "top_k", "min_p",
        "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "allowed_token_ids",
        "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs", "logits_processors",
    )  # fmt: skip
    """Fields that `SamplingParams` has under the same name and meaning."""

    def check_stream(self) -> None:
        """Raises `ApiError` for options that only make sense in the other mode."""
        if self.stream_options is not None and not self.stream:
            raise invalid(
                "'stream_options' may only be given together with 'stream': true.", "stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise invalid(
                "'prompt_logprobs' is not part of a stream; ask without 'stream'.", "prompt_logprobs"
            )

    def sampling_params(
        self, defaults: Mapping[str, Any], *, max_tokens: int | None, max_model_len: int, **more: Any
    ) -> SamplingParams:
        """The model's own defaults under what the caller gave. Raises `ParameterError` for values out of range.

        ``max_tokens`` above the context's length means the same as the context's length, whatever the number.
        """
        chosen = {name: value for name in self.PASSED_ON if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            chosen["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        if max_tokens is not None:
            max_tokens = min(max_tokens, max_model_len)
        return SamplingParams(**{**defaults, **chosen, "max_tokens": max_tokens, **more})


def check_logprobs_count(name: str, value: int) -> int:
    if not 0 <= value <= MAX_LOGPROBS:
        raise invalid(f"{name} must be from 0 to {MAX_LOGPROBS}, got {value}", name, "invalid_value")
    return value


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise invalid(
            f'logit_bias: "{key[:MAX_NAME_CHARS]}" is not a token id', "logit_bias", "invalid_value"
        )
    return int(key)
