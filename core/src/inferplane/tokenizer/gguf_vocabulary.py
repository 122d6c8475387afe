"""The vocabulary in a GGUF file's metadata, checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from inferplane.models.errors import ModelLoadError

if TYPE_CHECKING:
    from inferplane.models.loader.gguf_reader import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_KINDS = frozenset(range(7))


@dataclass(frozen=True)
class GGUFVocabulary:
    metadata: Metadata
    tokens: list[str]
    kinds: list[int]
    """``tokenizer.ggml.token_type`` of each token."""

    @classmethod
    def read(cls, metadata: Metadata) -> GGUFVocabulary:
        tokens = metadata.texts("tokenizer.ggml.tokens")
        kinds = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens))
        kinds = [NORMAL] * len(tokens) if kinds is None else kinds
        if not tokens or not set(kinds) <= _KINDS:
            raise ModelLoadError(f"{metadata.path}: tokenizer.ggml.tokens or token_type is damaged")
        return cls(metadata, tokens, kinds)

    @cached_property
    def id_of_token(self) -> dict[str, int]:
        found = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(found) != len(self.tokens):
            first = next(token_id for token_id, token in enumerate(self.tokens) if found[token] != token_id)
            raise ModelLoadError(
                f"{self.metadata.path}: tokenizer.ggml.tokens has {self.tokens[first]!r} twice, as ids {first} and "
                f"{found[self.tokens[first]]}"
            )
        return found

    def of_kind(self, *kinds: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]

    def scores(self) -> list[float]:
        scores = _numbers(self.metadata, "tokenizer.ggml.scores", len(self.tokens))
        if scores is None:
            raise ModelLoadError(f"{self.metadata.path}: tokenizer.ggml.scores is missing")
        return scores

    def special_token(self, name: str) -> str | None:
        """The text of ``tokenizer.ggml.<name>_token_id``."""
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = self.metadata.optional_integer(key)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise ModelLoadError(
                f"{self.metadata.path}: {key} is {token_id}, but there are {len(self.tokens)} tokens"
            )
        return self.tokens[token_id]


def _numbers(metadata: Metadata, key: str, num: int) -> list[Any] | None:
    values = metadata.optional_array(key)
    if values is None:
        return None
    if len(values) != num:
        raise ModelLoadError(f"{metadata.path}: {key} has {len(values)} entries for {num} tokens")
    return values.tolist()
