from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vocabularies
from inferplane.engine.detokenizer import ByteDetokenizer, DetokenizerFactory, WindowDetokenizer
from inferplane.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_LEVEL = vocabularies.byte_level()
LLAMA2 = vocabularies.sentencepiece()
GEMMA = vocabularies.sentencepiece(drops_first_space=False)
WORDPIECE = vocabularies.wordpiece()


def pieces(
    tokenizer: Tokenizer, token_ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True
) -> list[str]:
    """What each token shows, and at last what was held back."""
    detokenizer = DetokenizerFactory(tokenizer).create(prompt, skip_special_tokens=skip)
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)


def test_byte_tables_serve_the_vocabularies_that_join_bytes() -> None:
    for tokenizer, kind in (
        (BYTE_LEVEL, ByteDetokenizer),
        (LLAMA2, ByteDetokenizer),
        (WORDPIECE, WindowDetokenizer),
    ):
        assert type(DetokenizerFactory(tokenizer).create([])) is kind


@given(token_ids=ids_of(BYTE_LEVEL), skip=st.booleans())
def test_byte_level_text_is_the_one_shot_decode(token_ids: list[int], skip: bool) -> None:
    assert "".join(pieces(BYTE_LEVEL, token_ids, skip=skip)) == BYTE_LEVEL.decode(
        token_ids, skip_special_tokens=skip
    )


@given(text=st.text(max_size=30))
def test_no_replacement_while_characters_are_whole(text: str) -> None:
    token_ids = BYTE_LEVEL.encode(text)
    shown = pieces(BYTE_LEVEL, token_ids)
    assert "".join(shown) == text
    assert shown[-1] == ""
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in shown)


@given(text=st.text(min_size=1, max_size=8), data=st.data())
def test_a_cut_character_is_one_replacement_at_the_very_end(text: str, data: st.DataObject) -> None:
    text = text.replace(REPLACEMENT, "")
    for tokenizer in (BYTE_LEVEL, GEMMA):
        token_ids = [token_of_byte(tokenizer, byte) for byte in text.encode()]
        num_kept = data.draw(st.integers(0, len(token_ids)))
        whole = "".join(pieces(tokenizer, token_ids[:num_kept]))
        kept = text.encode()[:num_kept].decode(errors="ignore")
        assert whole in (kept, kept + REPLACEMENT)


@cache
def token_of_byte(tokenizer: Tokenizer, byte: int) -> int:
    if tokenizer is BYTE_LEVEL:
        by_bytes = {tokenizer.id_to_token_bytes(i): i for i in range(tokenizer.vocab_size)}
        return by_bytes[bytes([byte])]
    found = tokenizer.token_to_id(f"<0x{byte:02X}>")
    assert found is not None
    return found


@pytest.mark.parametrize("tokenizer", [LLAMA2, GEMMA])
@given(data=st.data(), skip=st.booleans())
def test_sentencepiece_text_is_the_one_shot_decode(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    text_ids = [
        i for i in range(tokenizer.vocab_size) if not (tokenizer.id_to_token(i) or "").startswith("<0x")
    ]
    # whole characters in bytes: of a broken one the decoder makes as many replacements as it has bytes
    parts = st.one_of(
        st.sampled_from(text_ids).map(lambda i: [i]),
        st.characters(min_codepoint=32, exclude_categories=["Cs"]).map(
            lambda c: [token_of_byte(tokenizer, b) for b in c.encode()]
        ),
    )
    token_ids = [i for part in data.draw(st.lists(parts, max_size=12)) for i in part]
    assert "".join(pieces(tokenizer, token_ids, skip=skip)) == tokenizer.decode(
        token_ids, skip_special_tokens=skip
    )


@given(data=st.data())
def test_sentencepiece_output_continues_its_prompt(data: st.DataObject) -> None:
    names = ["▁", "▁the", "▁dog", "the", ".", "▁▁", "<s>"]
    ids = st.lists(st.sampled_from([LLAMA2.token_to_id(n) for n in names]), max_size=8)
    prompt, output = data.draw(ids), data.draw(ids)
    if all(token_id in LLAMA2.special_ids for token_id in prompt):
        prompt_text = ""
    else:
        prompt_text = LLAMA2.decode(prompt)
    whole = LLAMA2.decode(prompt + output)
    assert prompt_text + "".join(pieces(LLAMA2, output, prompt)) == whole


def test_a_space_after_skipped_tokens_survives() -> None:
    ids = [LLAMA2.token_to_id(n) for n in ("▁the", "</s>", "</s>", "</s>", "</s>", "</s>", "</s>", "▁dog")]
    assert "".join(pieces(LLAMA2, ids)) == "the dog"
    assert "".join(pieces(LLAMA2, ids[1:], prompt=ids[:1])) == " dog"
    assert "".join(pieces(LLAMA2, ids[7:], prompt=ids[1:7])) == "dog"


@given(token_ids=ids_of(WORDPIECE), skip=st.booleans())
def test_other_decoders_go_through_a_window(token_ids: list[int], skip: bool) -> None:
    assert "".join(pieces(WORDPIECE, token_ids, skip=skip)) == WORDPIECE.decode(
        token_ids, skip_special_tokens=skip
    )


def test_the_window_stays_short_even_on_broken_text() -> None:
    longest = 0

    def decode(token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return REPLACEMENT * len(token_ids)

    detokenizer = WindowDetokenizer(decode, (), [])
    shown = "".join(detokenizer.push(7) for _ in range(500)) + detokenizer.finish()
    assert len(shown) == 500
    assert longest < 30


def test_ids_outside_the_vocabulary_give_no_text() -> None:
    assert "".join(pieces(BYTE_LEVEL, [10**6])) == ""
