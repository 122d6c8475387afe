"""The bytes that a token stands for, which need not be whole characters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"

TokenToBytes = Callable[[str], bytes]


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that byte-level vocabularies write for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_level_alphabet()


def token_to_bytes(backend: tokenizers.Tokenizer) -> TokenToBytes:
    """How the vocabulary of ``backend`` writes bytes, as its decoder tells."""
    kinds = _decoder_kinds(backend)
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return _marked_spaces
    return str.encode


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {part["type"] for part in state.get("decoders", [state])}


def _byte_level(token: str) -> bytes:
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        # a token that was added as it reads
        return token.encode()


def _marked_spaces(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte.group(1), 16)]) if byte else token.replace(_SPACE_MARK, " ").encode()
