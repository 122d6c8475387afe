"""`BadWords`: the token sequences that would write a banned word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from inferplane.engine.token_bytes import TokenBytes
from inferplane.tokenizer import Tokenizer

MAX_SPELLINGS = 64
"""Of one text. The shortest come first, and those that a model falls back to when the usual one is banned are short."""
MAX_SPELLINGS_OF_REQUEST = 1024
"""A request with many words gets fewer spellings of each, at the least the usual ones: they cost time in every step."""
MAX_SPELLED_BYTES = 64
"""Longer texts, which are phrases rather than words, are banned in their usual spelling only."""


class BadWords:
    """Spells words in a vocabulary.

    A vocabulary can write a word in many ways, and a model whose first choice is banned takes the next: so each word
    is banned with and without a space before it, and also in pieces that its usual tokenization would not choose.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Token sequences, each of which must not be completed; without duplicates."""
        limit = min(MAX_SPELLINGS, MAX_SPELLINGS_OF_REQUEST // (2 * max(1, len(words))))
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.strip(" ") or word
            for text in (bare, " " + bare):
                usual = self._tokenizer.encode(text, add_special_tokens=False)
                if bare in self._tokenizer.decode(usual):  # and not an unknown token in its place
                    found[tuple(usual)] = None
                data = text.encode()
                if limit and len(data) <= MAX_SPELLED_BYTES:
                    found.update(dict.fromkeys(self._split(data, limit)))
        return [list(ids) for ids in found]

    @cached_property
    def _id_of_bytes(self) -> dict[bytes, int]:
        token_bytes = TokenBytes.of(self._tokenizer)
        if token_bytes is None:
            return {}
        special_ids = self._tokenizer.special_ids
        ids = (i for i in range(self._tokenizer.vocab_size - 1, -1, -1) if i not in special_ids)
        # the lowest id wins, which is the more usual one of two that read alike
        return {piece: token_id for token_id in ids if (piece := token_bytes[token_id])}

    def _split(self, text: bytes, limit: int) -> list[tuple[int, ...]]:
        """Up to ``limit`` ways to write ``text``, fewest tokens first."""
        lengths = self._possible_lengths(text)
        splits: list[tuple[int, ...]] = []
        for num_tokens in range(1, len(text) + 1):
            if lengths[0] >> num_tokens & 1:
                for ids in self._splits_of_length(text, 0, num_tokens, lengths):
                    splits.append(ids)
                    if len(splits) == limit:
                        return splits
        return splits

    def _possible_lengths(self, text: bytes) -> list[int]:
        """For each position the numbers of tokens in which the rest can be written, as the bits of an integer."""
        lengths = [0] * len(text) + [1]
        for start in range(len(text) - 1, -1, -1):
            for end in range(start + 1, len(text) + 1):
                if lengths[end] and text[start:end] in self._id_of_bytes:
                    lengths[start] |= lengths[end] << 1
        return lengths

    def _splits_of_length(
        self, text: bytes, start: int, num_tokens: int, lengths: Sequence[int]
    ) -> Iterator[tuple[int, ...]]:
        """Looks into no dead end, so that the time is in proportion to what it finds."""
        if num_tokens == 0:
            yield ()
            return
        for end in range(len(text), start, -1):
            if lengths[end] >> (num_tokens - 1) & 1:
                token_id = self._id_of_bytes.get(text[start:end])
                if token_id is not None:
                    for rest in self._splits_of_length(text, end, num_tokens - 1, lengths):
                        yield (token_id, *rest)
