"""Sampling settings of single requests, through the whole engine on the CPU platform."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from inferplane import LLM, RequestOutput, SamplingParams
from inferplane.request import FinishReason, ParameterError
from offline import assert_idle, greedy, open_llm, run, run_together, tokens

EOS = 2
"""Of the tiny models."""
PROMPTS = [
    "You",
    "The Licensor grants you a license",
    "Redistribution of the Work, in any medium 🙂 中文, with or without modifications",
]


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[LLM]:
    with open_llm(smollm2_gguf, kv_cache_bytes=128 << 20) as llm:
        yield llm


# Where an answer ends


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_is_exact(llm: LLM, prompt: str, min_tokens: int, temperature: float) -> None:
    """The prompts are shorter and longer than min_tokens, which makes no difference."""
    params = SamplingParams(
        temperature=temperature, max_tokens=32, min_tokens=min_tokens, logit_bias={EOS: 100.0}, seed=1
    )
    output = run(llm, prompt, params)
    assert EOS not in tokens(output)[:min_tokens]
    assert tokens(output)[min_tokens:] == [EOS]
    assert output.outputs[0].finish_reason == FinishReason.STOP
    # the same for a token that the request names
    named = SamplingParams(
        temperature=0.0, max_tokens=32, min_tokens=min_tokens, logit_bias={7: 100.0}, stop_token_ids=[7]
    )
    output = run(llm, prompt, named)
    assert 7 not in tokens(output)[:min_tokens]
    assert tokens(output)[min_tokens:] == [7]
    assert output.outputs[0].stop_reason == 7


def test_min_tokens_holds_when_no_other_token_is_likely(llm: LLM) -> None:
    params = greedy(6, min_tokens=6, ignore_eos=False, allowed_token_ids=[EOS, 9], logit_bias={EOS: 100.0})
    output = run(llm, PROMPTS[0], params)
    assert (tokens(output), output.outputs[0].finish_reason) == ([9] * 6, FinishReason.LENGTH)


def test_every_end_token_of_the_model_can_be_ignored(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "model"
    shutil.copytree(folder, own)
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 5]}))
    with open_llm(own) as llm:
        for end in (EOS, 5):
            forced = {"max_tokens": 20, "temperature": 0.0, "logit_bias": {end: 100.0}}
            output = run(llm, PROMPTS[0], SamplingParams(**forced))
            assert (tokens(output), output.outputs[0].finish_reason) == ([end], FinishReason.STOP)
            output = run(llm, PROMPTS[0], SamplingParams(**forced, ignore_eos=True))
            assert (tokens(output), output.outputs[0].finish_reason) == ([end] * 20, FinishReason.LENGTH)
            # what the request names still stops it
            output = run(llm, PROMPTS[0], SamplingParams(**forced, ignore_eos=True, stop_token_ids=[end]))
            assert (tokens(output), output.outputs[0].finish_reason) == ([end], FinishReason.STOP)
            assert output.outputs[0].stop_reason == end


# logit_bias


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("logit_bias", {99999999: 5}, "99999999"),
        ("logit_bias", {1024: 5}, "1024"),
        ("logit_bias", {-1: 5}, "-1"),
        ("logit_bias", {"abc": 5}, "abc"),
        ("logit_bias", {"5": 5}, "'5'"),
        ("logit_bias", {5: "x"}, "'x'"),
        ("logit_bias", {5: 1000}, "1000"),
        ("logit_bias", {5: float("nan")}, "nan"),
        ("logit_bias", dict.fromkeys(range(2000), 1.0), "2000"),
        ("stop_token_ids", [99999999], "99999999"),
        ("stop_token_ids", ["a"], "'a'"),
        ("allowed_token_ids", [3, -1], "-1"),
        ("allowed_token_ids", [1.5], "1.5"),
        ("allowed_token_ids", [], "empty"),
    ],
)
def test_impossible_token_ids_are_refused_and_neighbours_run_on(
    llm: LLM, field: str, value: Any, named: str
) -> None:
    alone = tokens(run(llm, PROMPTS[1], greedy()))
    neighbour = llm.stream(PROMPTS[1], greedy())
    next(neighbour)
    with pytest.raises(ParameterError, match=re.escape(named)) as refused:
        run(llm, PROMPTS[0], SamplingParams(**{field: value}))
    assert refused.value.param == field
    *_, last = neighbour
    assert tokens(last) == alone
    assert_idle(llm)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_ends_of_logit_bias_ban_and_force(llm: LLM, temperature: float) -> None:
    for prompt in PROMPTS:
        usual = tokens(run(llm, prompt, greedy()))
        banned = dict.fromkeys(usual, -100.0)
        params = greedy(temperature=temperature, seed=3, logit_bias=banned)
        assert not set(usual) & set(tokens(run(llm, prompt, params)))
        forced = greedy(temperature=temperature, seed=3, logit_bias={77: 100.0})
        assert tokens(run(llm, prompt, forced)) == [77] * 12


# bad_words


@pytest.mark.parametrize(
    "prompt", ["The capital of France is", "Once upon a time there was a", "1. Wash your hands\n2."]
)
def test_banned_words_do_not_come_out(smollm2: LLM, prompt: str) -> None:
    """Words from what the model wants to say, one more in each round, so that it has to fall back ever further."""
    banned: list[str] = []
    usual = run(smollm2, prompt, greedy(24))
    text = usual.outputs[0].text
    for _ in range(4):
        words = [word for word in re.findall(r"[A-Za-z]{3,}", text) if word not in banned]
        if not words:
            break
        banned.append(words[len(banned) % len(words)])
        output = run(smollm2, prompt, greedy(24, bad_words=banned))
        text = output.outputs[0].text
        assert not set(banned) & set(re.findall(r"[A-Za-z]+", text)), (banned, text)


def test_a_banned_word_at_the_very_start(smollm2: LLM) -> None:
    for prompt in ("The capital of France is", "Monday, Tuesday,"):
        usual = run(smollm2, prompt, greedy(4)).outputs[0].text
        word = usual.split()[0].strip(",.")
        for written in (word, " " + word):
            text = run(smollm2, prompt, greedy(4, bad_words=[written])).outputs[0].text
            assert not text.lstrip().startswith(word), (written, text)


def test_only_the_token_that_completes_a_banned_phrase_is_blocked(smollm2: LLM) -> None:
    prompt = "The capital of France is"
    usual = run(smollm2, prompt, greedy(24))
    tokenizer, ids = smollm2.get_tokenizer(), tokens(usual)
    for start, length in ((0, 2), (3, 2), (5, 3), (8, 4)):
        phrase = tokenizer.decode(ids[start : start + length])
        first_end = next(end for end in range(25) if phrase.strip(" ") in tokenizer.decode(ids[:end]))
        output = run(smollm2, prompt, greedy(24, bad_words=[phrase]))
        assert tokens(output)[: first_end - 1] == ids[: first_end - 1], phrase
        assert tokens(output)[first_end - 1] != ids[first_end - 1], phrase
        assert phrase.strip(" ") not in output.outputs[0].text


# Neighbours

A = ("A request that counts repetitions", greedy(16, repetition_penalty=2.0))
B = ("B draws from one token only", SamplingParams(seed=99, top_k=1, max_tokens=16, ignore_eos=True))


def test_two_requests_in_both_orders_and_alone(llm: LLM) -> None:
    a_alone, b_alone = tokens(run(llm, *A)), tokens(run(llm, *B))
    for _ in range(2):
        a, b = run_together(llm, A, B)
        assert (tokens(a), tokens(b)) == (a_alone, b_alone)
        b, a = run_together(llm, B, A)
        assert (tokens(a), tokens(b)) == (a_alone, b_alone)


def many_settings() -> list[SamplingParams]:
    """Each setting that changes what is sampled, greedy and drawn."""
    settings: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 2.0},
        {"logprobs": 5},
        {"logit_bias": {40: 5.0, 41: -100.0}},
        {"min_tokens": 6, "ignore_eos": False},
        {"bad_words": ["the", "of"]},
        {"allowed_token_ids": list(range(30, 400))},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
    ]
    return [
        *(greedy(8, **each) for each in settings[:9]),
        *(greedy(8, temperature=1.2, seed=index, **each) for index, each in enumerate(settings)),
    ]


def test_no_setting_reaches_a_neighbour(llm: LLM) -> None:
    requests = [(PROMPTS[index % 3], params) for index, params in enumerate(many_settings())]
    alone = [run(llm, *request) for request in requests]
    pairs = list(permutations(range(len(requests)), 2))
    for first, second in random.Random(5).sample(pairs, 80):
        pair = run_together(llm, requests[first], requests[second])
        assert_same(pair, [alone[first], alone[second]])
    for seed in range(4):
        order = random.Random(seed).sample(range(len(requests)), len(requests))
        assert_same(run_together(llm, *(requests[i] for i in order)), [alone[i] for i in order])
    assert_idle(llm)


def assert_same(outputs: Sequence[RequestOutput], wanted: Sequence[RequestOutput]) -> None:
    for output, each in zip(outputs, wanted, strict=True):
        [ours], [theirs] = output.outputs, each.outputs
        assert (ours.token_ids, ours.text, ours.finish_reason) == (
            theirs.token_ids,
            theirs.text,
            theirs.finish_reason,
        )
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)


# Temperature and seed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_very_low_temperatures_are_greedy(folder: Path, dtype: str) -> None:
    with open_llm(folder, dtype=dtype) as llm:
        check_low_temperatures(llm, PROMPTS, num_tokens=12)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_very_low_temperatures_are_greedy_on_a_real_model(smollm2_gguf: Path, dtype: str) -> None:
    with open_llm(smollm2_gguf, dtype=dtype, kv_cache_bytes=128 << 20) as llm:
        check_low_temperatures(
            llm, ["The capital of France is", "1, 2, 3,", "Once upon a time"], num_tokens=24
        )


def check_low_temperatures(llm: LLM, prompts: Sequence[str], num_tokens: int) -> None:
    """In half precision the shape of a batch shows in the last bits: there a request is compared within its batch."""
    is_exact = llm.config.model.dtype == "float32"
    for prompt in prompts:
        usual = tokens(run(llm, prompt, greedy(num_tokens)))
        for more in ({}, {"logit_bias": {usual[0]: -100.0}}, {"top_p": 0.9}, {"top_k": 40}):
            batch = [(prompt, greedy(num_tokens, temperature=0.0, **more))]
            for temperature in (1e-4, 1e-6, 1e-12, 5e-324):
                batch.append((prompt, greedy(num_tokens, temperature=temperature, seed=5, **more)))
            hot = (prompt, greedy(num_tokens, temperature=2.0, seed=11, **more))
            best, *cold, last = (tokens(output) for output in run_together(llm, *batch, hot))
            assert cold == [best] * 4, more
            assert usual[0] not in best or "logit_bias" not in more
            assert len(last) == num_tokens
            assert last != best
            if is_exact:
                assert best == tokens(run(llm, *batch[0]))
                assert last == tokens(run(llm, *hot))


def test_a_seed_gives_the_same_text_alone_among_others_cold_and_warm(folder: Path) -> None:
    prompt = PROMPTS[2]  # longer than a block
    params = SamplingParams(temperature=0.8, seed=123, max_tokens=24, ignore_eos=True)
    choose = random.Random(1)

    def neighbour() -> tuple[str, SamplingParams]:
        temperature = choose.choice([0.0, 0.7, 1.5])
        return choose.choice(PROMPTS), SamplingParams(
            temperature=temperature, max_tokens=choose.randrange(1, 40), top_k=choose.choice([0, 1, 20])
        )

    with (
        open_llm(folder, block_size=16) as llm,
        open_llm(folder, enable_prefix_caching=False, seed=77) as uncached,
    ):
        cold = run(llm, prompt, params)
        wanted = tokens(cold)
        assert cold.num_cached_tokens == 0
        for _ in range(10):
            warm = run(llm, prompt, params)
            assert warm.num_cached_tokens > 0
            assert tokens(warm) == wanted
            assert tokens(run(uncached, prompt, params)) == wanted
        for engine in (llm, uncached):
            for index in range(10):
                batch = [neighbour() for _ in range(16)]
                batch.insert(index, (prompt, params))
                assert tokens(run_together(engine, *batch)[index]) == wanted
        others = {
            tuple(tokens(run(llm, prompt, greedy(24, temperature=0.8, seed=seed)))) for seed in range(5)
        }
        assert len(others) == 5
