"""``/v1/completions`` against an engine whose answers are known."""

from __future__ import annotations

import pytest

from http_answers import error_of, sse_chunks, strict_json
from inferplane_server.logprobs import CompletionLogprobs, TokenTexts
from scripted_engine import EOS_ID, ScriptedEngine, answer_text


async def test_an_answer_has_the_documented_shape(client):
    body = strict_json((await client.complete("abc", max_tokens=5)).text)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert choice["text"] == answer_text("abc", 5)
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 5


async def test_without_max_tokens_sixteen_are_made(client):
    assert strict_json((await client.complete("abc")).text)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", [["ab", "cde"], [[97, 98], [99, 100, 101]], ["ab", [99, 100, 101]]])
@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client, prompt, stream):
    expected = [
        answer_text("ab", 4),
        answer_text("ab", 4, 1),
        answer_text("cde", 4),
        answer_text("cde", 4, 1),
    ]
    options = {"include_usage": True} if stream else None
    response = await client.complete(prompt, max_tokens=4, n=2, stream=stream, stream_options=options)
    if stream:
        texts = [""] * 4
        *chunks, last = sse_chunks(response)
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["text"]
        usage = last["usage"]
    else:
        body = strict_json(response.text)
        texts, usage = [choice["text"] for choice in body["choices"]], body["usage"]
    assert texts == expected
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 16)


async def test_token_ids_are_a_prompt(client):
    body = strict_json((await client.complete([97, 98, 99], max_tokens=5)).text)
    assert body["choices"][0]["text"] == answer_text("abc", 5)


@pytest.mark.parametrize("prompt", ["a b c", [97, 32, 98, 32, 99]])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_covers_prompt_and_answer(client, prompt, max_tokens, num_top, stream):
    response = await client.complete(
        prompt, echo=True, logprobs=num_top, max_tokens=max_tokens, stream=stream
    )
    if stream:
        choices = [chunk["choices"][0] for chunk in sse_chunks(response)]
        layouts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        logprobs = {key: [x for layout in layouts for x in layout[key]] for key in layouts[0]}
        text = "".join(choice["text"] for choice in choices)
    else:
        (choice,) = strict_json(response.text)["choices"]
        logprobs, text = choice["logprobs"], choice["text"]
    answer = answer_text("a b c", max_tokens)
    assert text == "a b c" + answer
    assert logprobs["tokens"] == list("a b c" + answer)
    assert logprobs["text_offset"] == list(range(5 + max_tokens))
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (4 + max_tokens)
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == num_top for top in logprobs["top_logprobs"][1:])


async def test_echo_over_a_list_of_prompts_with_n(client):
    body = strict_json((await client.complete(["xy", "z"], echo=True, logprobs=1, max_tokens=0, n=2)).text)
    assert [choice["text"] for choice in body["choices"]] == ["xy", "xy", "z", "z"]
    assert [choice["logprobs"]["tokens"] for choice in body["choices"]] == [
        ["x", "y"],
        ["x", "y"],
        ["z"],
        ["z"],
    ]
    assert body["usage"]["completion_tokens"] == 0


async def test_an_echo_waits_for_the_logprobs_of_its_prompt(make_client):
    client = make_client(ScriptedEngine(late_prompt_logprobs=True))
    chunks = sse_chunks(await client.complete("xyz", echo=True, logprobs=1, max_tokens=4, n=3, stream=True))
    for index in range(3):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        answer = answer_text("xyz", 4, index)
        assert "".join(choice["text"] for choice in choices) == "xyz" + answer
        assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == list("xyz" + answer)


async def test_without_echo_logprobs_cover_the_answer_only(client):
    (choice,) = strict_json((await client.complete("abc", logprobs=1, max_tokens=3)).text)["choices"]
    assert choice["logprobs"]["tokens"] == list(answer_text("abc", 3))
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


async def test_minus_infinity_becomes_a_finite_floor(make_client):
    client = make_client(ScriptedEngine(logprob=float("-inf")))
    (choice,) = strict_json((await client.complete("correct horse", echo=True, logprobs=1)).text)["choices"]
    assert choice["logprobs"]["token_logprobs"][1:] == [-9999.0] * (len("correct horse") - 1 + 16)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 1000}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template": "x"}, "chat_template"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "usage"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(client, fields, param):
    error_of(await client.complete("abc", **fields), 400, param=param)


async def test_fields_that_change_nothing_are_accepted(client):
    response = await client.complete("abc", suffix="", best_of=2, n=2, user="u", max_tokens=1)
    assert response.status_code == 200


def test_offsets_count_characters_and_not_bytes():
    texts = TokenTexts(ScriptedEngine().tokenizer)
    layout = CompletionLogprobs(texts, 0, skip_special_tokens=True)
    tokens = list("é€a".encode())
    found = layout.of_prompt(tokens, [None] * len(tokens))
    assert found["text_offset"] == [0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_come_with_the_text_when_asked_for(make_client, stream):
    """Also those that have no text."""
    client = make_client(ScriptedEngine(script=[97, EOS_ID, 98]))
    response = await client.complete("ab", max_tokens=5, stream=stream, n=2, return_token_ids=True)
    choices = (
        [choice for chunk in sse_chunks(response) for choice in chunk["choices"]]
        if stream
        else strict_json(response.text)["choices"]
    )
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        assert [token for choice in own for token in choice["token_ids"]] == [97, EOS_ID, 98]
        assert "".join(choice["text"] for choice in own) == "ab"
    plain = strict_json((await client.complete("ab", max_tokens=5)).text)
    assert "token_ids" not in plain["choices"][0]
