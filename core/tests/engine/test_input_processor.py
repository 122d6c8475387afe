from __future__ import annotations

import array

import pytest

import vocabularies
from inferplane.engine.errors import EmptyPromptError, PromptTooLongError
from inferplane.engine.input_processor import InputProcessor, ParsedPrompt, parse_prompt
from inferplane.request import MAX_SEED, ParameterError, SamplingParams

TOKENIZER = vocabularies.byte_level()
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def inputs() -> InputProcessor:
    return InputProcessor(
        TOKENIZER, max_model_len=32, vocab_size=400, eos_token_ids=[3, 4], logits_processors=["upper"]
    )


def test_prompts_come_in_four_forms() -> None:
    assert parse_prompt("hi") == ParsedPrompt("hi", None)
    assert parse_prompt({"prompt": "hi", "cache_salt": "s"}) == ParsedPrompt("hi", None, "s")
    assert parse_prompt({"prompt_token_ids": (1, 2)}) == ParsedPrompt(None, [1, 2])
    assert parse_prompt({"prompt_token_ids": [1], "prompt": "hi"}) == ParsedPrompt("hi", [1])
    assert parse_prompt([1, 2]) == ParsedPrompt(None, [1, 2])
    assert parse_prompt(array.array("i", [5])) == ParsedPrompt(None, [5])


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, {"text": "hi"}, {"prompt": 5}, ["a"], [True], [1.5], {"prompt": "a", "extra": 1}]
)
def test_other_forms_are_refused(prompt: object) -> None:
    with pytest.raises(TypeError, match=r"token ids|a prompt given as dict"):
        parse_prompt(prompt)  # type: ignore[arg-type]


def test_lengths(inputs: InputProcessor) -> None:
    with pytest.raises(EmptyPromptError, match="empty"):
        inputs.requests("r", [], GREEDY)
    for length in (32, 33, 500):
        with pytest.raises(PromptTooLongError, match=rf"{length} tokens.*32 tokens") as caught:
            inputs.requests("r", [1] * length, GREEDY)
        assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (length, 32)
    [fits] = inputs.requests("r", [1] * 31, SamplingParams(max_tokens=1))
    assert fits.max_tokens == 1
    # scoring a prompt needs no room for an answer
    [scored] = inputs.requests("r", [1] * 32, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert scored.max_tokens == 0


@pytest.mark.parametrize(
    ("asked", "given"), [(5, 5), (22, 22), (23, 22), (10**9, 22), (2**63 - 1, 22), (None, 22)]
)
def test_max_tokens_is_cut_to_the_room_left(inputs: InputProcessor, asked: int | None, given: int) -> None:
    [request] = inputs.requests("r", [1] * 10, SamplingParams(max_tokens=asked))
    assert request.max_tokens == given


@pytest.mark.parametrize("token_id", [-1, 400, 2**40])
def test_ids_outside_the_vocabulary(inputs: InputProcessor, token_id: int) -> None:
    with pytest.raises(ParameterError, match=rf"{token_id}.*0 to 399") as caught:
        inputs.requests("r", [1, token_id, 2], GREEDY)
    assert caught.value.param == "prompt"
    for field, value in (
        ("logit_bias", {token_id: 1.0}),
        ("stop_token_ids", [token_id]),
        ("allowed_token_ids", [token_id]),
    ):
        with pytest.raises(ParameterError, match=f"{token_id}") as caught:
            inputs.requests("r", [1], SamplingParams(**{field: value}))
        assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 2**31),
        ("priority", -(10**30)),
        ("priority", 1.5),
        ("priority", True),
        ("cache_salt", 5),
        ("cache_salt", b"salt"),
        ("cache_salt", "\ud83d"),
    ],
)
def test_what_no_message_to_the_engine_can_carry_is_refused(
    inputs: InputProcessor, field: str, value: object
) -> None:
    with pytest.raises(ParameterError, match=field) as caught:
        inputs.requests("r", [1], GREEDY, **{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


@pytest.mark.parametrize("token_id", [1.0, True, "1", None])
def test_token_ids_are_integers(inputs: InputProcessor, token_id: object) -> None:
    with pytest.raises(ParameterError, match=type(token_id).__name__) as caught:
        inputs.requests("r", [1, token_id], GREEDY)  # type: ignore[list-item]
    assert caught.value.param == "prompt"


def test_unknown_logits_processors_are_refused(inputs: InputProcessor) -> None:
    inputs.requests("r", [1], SamplingParams(logits_processors={"upper": None}))
    with pytest.raises(ParameterError, match=r"lower.*installed: upper") as caught:
        inputs.requests("r", [1], SamplingParams(logits_processors={"lower": 1}))
    assert caught.value.param == "logits_processors"


def test_completions_have_ids_and_seeds_of_their_own(inputs: InputProcessor) -> None:
    params = SamplingParams(n=4, seed=7, prompt_logprobs=2)
    requests = inputs.requests("a/0", [1, 2], params, priority=3, cache_salt="s")
    assert len({r.request_id for r in requests}) == 4
    assert [r.params.seed for r in requests] == [7, 8, 9, 10]
    assert [r.params.n for r in requests] == [1] * 4
    # the prompt is scored once
    assert [r.params.prompt_logprobs for r in requests] == [2, None, None, None]
    assert all(r.eos_token_ids == [3, 4] and r.priority == 3 and r.cache_salt == "s" for r in requests)
    again = inputs.requests("a/0", [1, 2], params)
    assert not {r.request_id for r in again} & {r.request_id for r in requests}, "an id is used once only"
    assert [r.params.seed for r in again] == [7, 8, 9, 10]
    unseeded = inputs.requests("c", [1], SamplingParams(n=3))
    assert [r.params.seed for r in unseeded] == [None] * 3
    largest = inputs.requests("d", [1], SamplingParams(n=3, seed=MAX_SEED))
    assert len({r.params.seed for r in largest}) == 3


def test_long_texts_encode_as_short_ones_do(inputs: InputProcessor) -> None:
    text = "The quick brown fox 🙂 " * 50
    assert inputs.encode(text) == TOKENIZER.encode(text)


@pytest.mark.parametrize(
    ("settings", "param", "bans"),
    [
        (
            {"allowed_token_ids": [9, 10], "logit_bias": {9: -100, 10: -100}},
            "allowed_token_ids",
            "logit_bias",
        ),
        ({"allowed_token_ids": [3], "min_tokens": 1}, "allowed_token_ids", "min_tokens"),
        (
            {
                "allowed_token_ids": [3, 9, 11],
                "stop_token_ids": [9],
                "min_tokens": 1,
                "logit_bias": {11: -100},
            },
            "allowed_token_ids",
            "logit_bias and min_tokens",
        ),
        ({"logit_bias": dict.fromkeys(range(400), -100)}, "logit_bias", "logit_bias"),
        (
            {"logit_bias": dict.fromkeys(range(5, 400), -100), "stop_token_ids": [0, 1, 2], "min_tokens": 2},
            "logit_bias",
            "logit_bias and min_tokens",
        ),
    ],
)
def test_settings_that_leave_no_first_token(
    inputs: InputProcessor, settings: dict[str, object], param: str, bans: str
) -> None:
    with pytest.raises(ParameterError, match=f"no token is left to choose: {bans} ban") as caught:
        inputs.requests("r", [1], SamplingParams(**settings))  # type: ignore[arg-type]
    assert caught.value.param == param
    # nothing is to be chosen
    assert inputs.requests("r", [1], SamplingParams(**{**settings, "min_tokens": 0, "max_tokens": 0}))  # type: ignore[arg-type]


def test_a_bad_word_may_be_the_only_token_allowed(inputs: InputProcessor) -> None:
    [[token_id], *_] = inputs._bad_words.spellings(["a"])
    with pytest.raises(ParameterError, match="bad_words ban every token that allowed_token_ids allows"):
        inputs.requests("r", [1], SamplingParams(bad_words=["a"], allowed_token_ids=[token_id]))


@pytest.mark.parametrize(
    "settings",
    [
        {"allowed_token_ids": [9, 10], "logit_bias": {9: -100, 10: -99.9}},
        {"allowed_token_ids": [3], "min_tokens": 0},
        {"allowed_token_ids": [3, 9], "min_tokens": 1},
        {"logit_bias": dict.fromkeys(range(399), -100)},
    ],
)
def test_settings_that_leave_one_token(inputs: InputProcessor, settings: dict[str, object]) -> None:
    assert inputs.requests("r", [1], SamplingParams(**settings))  # type: ignore[arg-type]
