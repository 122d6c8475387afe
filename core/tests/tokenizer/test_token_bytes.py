"""The bytes of tokens, against the decoders that join them."""

from __future__ import annotations

import pytest
from tokenizers import pre_tokenizers

import vocabularies
from inferplane.tokenizer.token_bytes import BYTE_OF_CHARACTER
from texts import CORPUS


def test_the_alphabet_is_that_of_byte_level_tokenizers() -> None:
    assert sorted(BYTE_OF_CHARACTER) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for character, byte in BYTE_OF_CHARACTER.items():
        if byte < 128:
            assert encode(chr(byte))[0][0] == character


@pytest.mark.parametrize("text", CORPUS)
def test_byte_level_tokens_join_to_the_text(text: str) -> None:
    tokenizer = vocabularies.byte_level()
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.id_to_token_bytes, ids)) == text.encode()


def test_pieces_with_marked_spaces_and_bytes() -> None:
    tokenizer = vocabularies.sentencepiece()
    bytes_of = {
        token: tokenizer.id_to_token_bytes(tokenizer.token_to_id(token))
        for token in ("▁the", "<0x0A>", "é", "<s>")
    }
    assert bytes_of == {"▁the": b" the", "<0x0A>": b"\n", "é": "é".encode(), "<s>": b"<s>"}


def test_ids_outside_the_vocabulary_have_no_bytes() -> None:
    tokenizer = vocabularies.byte_level()
    assert tokenizer.id_to_token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None
    for token_id in (-1, -(10**30), 10**6, 10**30):
        assert tokenizer.id_to_token_bytes(token_id) == b""
        assert tokenizer.id_to_token(token_id) is None
        assert tokenizer.decode([tokenizer.vocab_size, token_id]) == ""


def test_halves_of_characters_are_joined_or_replaced() -> None:
    tokenizer = vocabularies.byte_level()
    assert tokenizer.decode(tokenizer.encode("a\ud83d\ude42b")) == "a🙂b"
    for text in ("a\ud83db", "a\ude42b"):
        assert tokenizer.decode(tokenizer.encode(text)) == "a\ufffdb"
        assert tokenizer.encode_batch([text]) == [tokenizer.encode(text)]
