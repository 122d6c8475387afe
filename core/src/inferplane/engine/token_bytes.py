"""`TokenBytes`: the bytes that each token of a vocabulary adds to a text.

Text that arrives token by token is best put together from bytes: a character may span tokens, and only bytes tell a
character that is still incomplete from one that is broken.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from inferplane.tokenizer import Tokenizer
from inferplane.tokenizer.token_bytes import token_to_bytes


class TokenBytes:
    """``token_bytes[token_id]`` are its bytes, empty for an id that the vocabulary lacks. Looked up once per id.

    ``drops_first_space`` tells whether the decoder removes one space at the very start of a text.
    """

    def __init__(
        self,
        id_to_token: Callable[[int], str | None],
        to_bytes: Callable[[str], bytes],
        *,
        drops_first_space: bool,
    ) -> None:
        self._id_to_token = id_to_token
        self._to_bytes = to_bytes
        self._known: dict[int, bytes] = {}
        self._whole_texts: dict[int, str | None] = {}
        self.drops_first_space = drops_first_space

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenBytes | None:
        """None when the tokenizer's decoder does something else than to join the tokens' bytes."""
        drops_first_space = _drops_first_space(_decoder_steps(tokenizer))
        if drops_first_space is None:
            return None
        return cls(
            tokenizer.id_to_token, token_to_bytes(tokenizer.backend), drops_first_space=drops_first_space
        )

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            token = self._id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._to_bytes(token)
        return known

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token that consists of whole characters; None of one that may need its neighbours."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            pass
        try:
            text = self[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self._whole_texts[token_id] = text
        return text


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.backend.decoder is None:
        return []
    state = json.loads(tokenizer.backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _drops_first_space(steps: list[dict[str, Any]]) -> bool | None:
    """None when the steps are neither of a byte-level vocabulary nor of a SentencePiece one."""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return False
    if not {"ByteFallback", "Metaspace"} & set(kinds):
        return None
    drops = False
    for step in steps:
        match step:
            case {"type": "ByteFallback" | "Fuse"} | {
                "type": "Replace",
                "pattern": {"String": "▁"},
                "content": " ",
            }:
                continue
            case {"type": "Metaspace", "replacement": "▁"}:
                drops = step.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": 0 | 1 as num_spaces, "stop": 0}:
                drops = num_spaces == 1
            case _:
                return None
    return drops
