"""Incremental detokenization: tokens in, whole characters out, at a constant cost for each token.

The text is what the tokens add to their prompt: where a decoder drops the space at the start of a text
(SentencePiece), it keeps the one at the start of an output that follows a prompt.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial

from inferplane.engine.token_bytes import TokenBytes
from inferplane.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(ABC):
    """Of one completion. Joined, what `push` and at last `finish` return is the text of all tokens."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """The characters that this token completes; empty while a character is cut."""

    @abstractmethod
    def finish(self) -> str:
        """What was held back: a cut character becomes one U+FFFD."""


class DetokenizerFactory:
    """Makes detokenizers for one tokenizer, and keeps what they share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes.of(tokenizer)
        self._special_ids = tokenizer.special_ids

    def create(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        skipped = self._special_ids if skip_special_tokens else ()
        if self._token_bytes is None:
            context = _last_tokens_with_text(prompt_token_ids, skipped, _CONTEXT_TOKENS)
            return WindowDetokenizer(
                partial(self._tokenizer.decode, skip_special_tokens=False), skipped, context
            )
        drops_space = self._token_bytes.drops_first_space and not _last_tokens_with_text(
            prompt_token_ids, skipped, 1
        )
        return ByteDetokenizer(self._token_bytes, skipped, drops_first_space=drops_space)


class ByteDetokenizer(Detokenizer):
    """For vocabularies whose tokens are bytes to be joined: nearly all of today's."""

    __slots__ = ("_decoder", "_drops_space", "_skipped", "_token_bytes")

    def __init__(self, token_bytes: TokenBytes, skipped: Collection[int], *, drops_first_space: bool) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._drops_space = drops_first_space
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        text = self._token_bytes.whole_text(token_id)
        if text is None or self._decoder.buffer:
            text = self._decoder.decode(self._token_bytes[token_id])
        if text and self._drops_space:
            self._drops_space = False
            text = text.removeprefix(" ")
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


_CONTEXT_TOKENS = 4
_MAX_WINDOW_TOKENS = 16
_MAX_CUT_TOKENS = 4
"""A character has at most four bytes, so what is still cut after four tokens is broken."""


class WindowDetokenizer(Detokenizer):
    """For any other decoder: decodes a short window with and without its new tokens, and gives the difference."""

    def __init__(
        self, decode: Callable[[list[int]], str], skipped: Collection[int], context_token_ids: list[int]
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window = context_token_ids
        self._num_shown = len(context_token_ids)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._added_text()
        is_cut = text.endswith(_REPLACEMENT) and len(self._window) - self._num_shown < _MAX_CUT_TOKENS
        if not text or is_cut:
            return ""
        if len(self._window) > _MAX_WINDOW_TOKENS:
            del self._window[:-_CONTEXT_TOKENS]
        self._num_shown = len(self._window)
        return text

    def finish(self) -> str:
        text = self._added_text()
        self._num_shown = len(self._window)
        whole = text.rstrip(_REPLACEMENT)
        return whole + _REPLACEMENT if len(whole) < len(text) else whole

    def _added_text(self) -> str:
        shown = self._decode(self._window[: self._num_shown])
        return self._decode(self._window)[len(shown) :]


def _last_tokens_with_text(token_ids: Sequence[int], skipped: Collection[int], limit: int) -> list[int]:
    """Up to ``limit`` of the last tokens that are not skipped, in their order."""
    found: list[int] = []
    for token_id in reversed(token_ids):
        if len(found) == limit:
            break
        if token_id not in skipped:
            found.append(token_id)
    return found[::-1]
