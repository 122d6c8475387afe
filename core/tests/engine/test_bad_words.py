from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vocabularies
from inferplane.engine.bad_words import MAX_SPELLINGS, BadWords
from inferplane.tokenizer import Tokenizer

BYTE_LEVEL = vocabularies.byte_level()
LLAMA2 = vocabularies.sentencepiece()


def test_a_word_is_spelled_with_and_without_a_space_and_in_pieces() -> None:
    spellings = BadWords(BYTE_LEVEL).spellings(["dog"])
    texts = {BYTE_LEVEL.decode(ids) for ids in spellings}
    assert texts == {"dog", " dog"}
    assert BYTE_LEVEL.encode("dog") in spellings
    assert BYTE_LEVEL.encode(" dog") in spellings
    # letter by letter, which no tokenizer would do but a model can
    assert [BYTE_LEVEL.encode(letter)[0] for letter in "dog"] in spellings


@given(prefix=st.text("abe ", max_size=4), data=st.data())
def test_no_path_through_the_vocabulary_writes_a_short_word(prefix: str, data: st.DataObject) -> None:
    """Brute force: any tokens whose text holds the word at a token border complete a banned sequence."""
    word = data.draw(st.text("thedog", min_size=1, max_size=4))
    banned = BadWords(BYTE_LEVEL).spellings([word])
    ids = [*BYTE_LEVEL.encode(prefix), *split_at_random(BYTE_LEVEL, word, data)]
    assert any(ids[-len(spelling) :] == spelling for spelling in banned)


def split_at_random(tokenizer: Tokenizer, text: str, data: st.DataObject) -> list[int]:
    id_of = {tokenizer.id_to_token_bytes(i): i for i in range(tokenizer.vocab_size)}
    rest, ids = text.encode(), []
    while rest:
        fitting = [n for n in range(1, len(rest) + 1) if rest[:n] in id_of]
        num_bytes = data.draw(st.sampled_from(fitting))
        ids.append(id_of[rest[:num_bytes]])
        rest = rest[num_bytes:]
    return ids


def test_long_phrases_have_a_bounded_number_of_spellings() -> None:
    phrase = "the quick brown fox jumps over the lazy dog and then sleeps until the evening"
    spellings = BadWords(BYTE_LEVEL).spellings([phrase])
    assert BYTE_LEVEL.encode(phrase) in spellings
    assert len(spellings) <= 2 * (MAX_SPELLINGS + 1)
    assert {BYTE_LEVEL.decode(ids) for ids in spellings} == {phrase, " " + phrase}


def test_many_words_have_fewer_spellings_each() -> None:
    words = [f"the dog {i}" for i in range(600)]
    spellings = BadWords(BYTE_LEVEL).spellings(words)
    assert {BYTE_LEVEL.decode(ids).strip() for ids in spellings} == set(words)
    assert len(spellings) == 2 * len(words)


def test_a_word_with_millions_of_spellings_ends_quickly() -> None:
    # 2**20 ways and more: only the first are looked at
    spellings = BadWords(LLAMA2).spellings(["the" * 20])
    assert len(spellings) <= 2 * (MAX_SPELLINGS + 1)
    assert all("the" * 20 in LLAMA2.decode(ids) for ids in spellings)


def test_several_words_have_no_duplicates() -> None:
    spellings = BadWords(BYTE_LEVEL).spellings(["dog", " dog", "dog"])
    assert len({tuple(ids) for ids in spellings}) == len(spellings)


@pytest.mark.parametrize("tokenizer", [LLAMA2, vocabularies.wordpiece()])
def test_other_vocabularies(tokenizer: Tokenizer) -> None:
    spellings = BadWords(tokenizer).spellings(["dog"])
    assert spellings
    assert all("dog" in tokenizer.decode(ids) for ids in spellings)


def test_marked_spaces_count_as_spaces() -> None:
    spellings = BadWords(LLAMA2).spellings(["dog"])
    assert [LLAMA2.token_to_id("dog")] in spellings
    assert [LLAMA2.token_to_id("▁dog")] in spellings
