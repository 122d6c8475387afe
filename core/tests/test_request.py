"""`SamplingParams`: every field is checked, by name, at its borders."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferplane.request import MAX_LOGIT_BIAS, MAX_N, ParameterError, SamplingParams

REFUSED = [
    ("n", 0),
    ("n", MAX_N + 1),
    ("n", 100_000),
    ("n", 1.5),
    ("n", True),
    ("temperature", -1),
    ("temperature", 999_999),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", -1),
    ("top_p", 2),
    ("top_k", -5),
    ("top_k", 10**12),
    ("min_p", 2),
    ("min_p", -0.1),
    ("presence_penalty", 99),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-38),
    ("bad_words", ["ab " * 4000] * 1000),
    ("repetition_penalty", math.nan),
    ("seed", 2**70),
    ("seed", 1.0),
    ("min_tokens", -1),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", 2**63),
    ("logprobs", -1),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("stop", [""]),
    ("stop", ["a"] * 17),
    ("stop", [3]),
    ("stop", 5),
    ("stop", ["\ud800"]),
    ("bad_words", ["good", "\udc00bad"]),
    ("stop", {"END": 1}),
    ("bad_words", "word"),
    ("ignore_eos", "yes"),
    ("include_stop_str_in_output", None),
    ("skip_special_tokens", 1),
    ("logits_processors", ["upper"]),
    ("bad_words", [""]),
    ("logit_bias", {5: 1000.0}),
    ("logit_bias", {5: math.nan}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
    ("allowed_token_ids", []),
    ("logit_bias", {"abc": 1.0}),
    ("logit_bias", {"5": 1.0}),
    ("stop_token_ids", ["a"]),
    ("allowed_token_ids", [1.5]),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[f"{n}={str(v)[:20]}" for n, v in REFUSED])
def test_a_value_out_of_range_is_refused_by_the_name_of_its_field(name, value):
    with pytest.raises(ParameterError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


ACCEPTED = [
    ("temperature", 0),
    ("temperature", 1e-3),
    ("temperature", 100),
    ("top_p", 1),
    ("top_p", 1e-9),
    ("min_p", 0),
    ("min_p", 1),
    ("presence_penalty", -2),
    ("frequency_penalty", 2),
    ("seed", 2**63 - 1),
    ("seed", -(2**63)),
    ("max_tokens", 0),
    ("max_tokens", None),
    ("logprobs", 0),
    ("logprobs", 20),
    ("logit_bias", {0: -100, 1: 100}),
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=[f"{n}={str(v)[:20]}" for n, v in ACCEPTED])
def test_a_value_on_the_border_is_kept(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize("temperature", [9.9e-4, 1e-6, 1e-12, 5e-324])
def test_a_temperature_too_low_to_draw_by_is_greedy(temperature):
    params = SamplingParams(temperature=temperature)
    assert params.temperature == 0.0
    assert params.is_greedy


def test_top_k_of_minus_one_keeps_all():
    assert SamplingParams(top_k=-1).top_k == 0


def test_a_single_stop_string_becomes_a_list():
    assert SamplingParams(stop="END").stop == ["END"]
    assert SamplingParams().stop == []


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(ParameterError, match=r"min_tokens \(9\) is above max_tokens \(3\)"):
        SamplingParams(min_tokens=9, max_tokens=3)


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("token_id", [-1, 50, 99_999_999])
def test_a_token_outside_the_vocabulary_is_named(name, token_id):
    value = {token_id: 1.0} if name == "logit_bias" else [token_id]
    with pytest.raises(ParameterError, match=rf"{name} names token {token_id}, .* 0 to 49"):
        SamplingParams(**{name: value}).check_vocabulary(50)


def test_a_token_inside_the_vocabulary_passes():
    SamplingParams(
        logit_bias={0: 1.0, 49: -1.0}, stop_token_ids=[49], allowed_token_ids=[0]
    ).check_vocabulary(50)


@given(
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=16),
    logit_bias=st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=8),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
)
def test_params_cross_a_process_unchanged(**values):
    params = SamplingParams(**values)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
