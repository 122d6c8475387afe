"""Log-probabilities in the layouts of the two APIs. Every figure is finite, as JSON demands."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from inferplane.request import PositionLogprobs, TokenLogprob
from inferplane.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which a banned token has and JSON has not."""

Position = PositionLogprobs | None
"""None for the first token of a prompt, which nothing predicts."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


class TokenTexts:
    """Tokens as texts and bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.bytes_of = lru_cache(maxsize=65536)(tokenizer.id_to_token_bytes)
        self.special_ids = tokenizer.special_ids

    def text_of(self, token_id: int) -> str:
        """A part of a character is written as its bytes in hexadecimal, so that different tokens look different."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(positions: Sequence[Position], texts: TokenTexts, num_top: int) -> dict[str, Any]:
    """``{"content": [{token, logprob, bytes, top_logprobs}]}``: one entry for each token, alternatives best first."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {
            "token": texts.text_of(token.token_id),
            "logprob": finite(token.logprob),
            "bytes": list(texts.bytes_of(token.token_id)),
        }

    return {
        "content": [
            {**entry(position.chosen), "top_logprobs": [entry(token) for token in position.top[:num_top]]}
            for position in positions
            if position is not None
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """``{tokens, token_logprobs, top_logprobs, text_offset}``: four lists with one entry for each token.

    Kept over the chunks of one completion, because offsets count characters from the start of its text.
    """

    def __init__(self, texts: TokenTexts, num_top: int, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._num_top = num_top
        self._skipped = texts.special_ids if skip_special_tokens else frozenset()
        self._decoder = _Utf8Decoder("replace")
        self._offset = 0

    def of_prompt(self, token_ids: Sequence[int], positions: Sequence[Position]) -> dict[str, Any]:
        """For a prompt that is echoed before its completion; the first token has no log-probability."""
        return self._layout(list(zip(token_ids, positions)))

    def of_output(self, positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
        return self._layout([(position.chosen.token_id, position) for position in positions])

    def _layout(self, tokens: list[tuple[int, Position]]) -> dict[str, Any]:
        return {
            "tokens": [self._texts.text_of(token_id) for token_id, _ in tokens],
            "token_logprobs": [None if p is None else finite(p.chosen.logprob) for _, p in tokens],
            "top_logprobs": [None if p is None else self._top(p) for _, p in tokens],
            "text_offset": [self._advance(token_id) for token_id, _ in tokens],
        }

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """The best tokens, and the one that was chosen if it is not among them."""
        top = {self._texts.text_of(t.token_id): finite(t.logprob) for t in position.top[: self._num_top]}
        if self._num_top:
            top.setdefault(self._texts.text_of(position.chosen.token_id), finite(position.chosen.logprob))
        return top

    def _advance(self, token_id: int) -> int:
        offset = self._offset
        if token_id not in self._skipped:
            self._offset += len(self._decoder.decode(self._texts.bytes_of(token_id)))
        return offset


def join_layouts(layouts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: [entry for layout in layouts for entry in layout[name]] for name in layouts[0]}


def prompt_logprobs_by_id(positions: Sequence[Position], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """For the extension ``prompt_logprobs``: at each position the tokens by id, with log-probability, rank and text."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {
            "logprob": finite(token.logprob),
            "rank": token.rank,
            "decoded_token": texts.text_of(token.token_id),
        }

    return [
        None if p is None else {str(token.token_id): entry(token) for token in (p.chosen, *p.top)}
        for p in positions
    ]
