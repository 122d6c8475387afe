"""``/v1/chat/completions`` against an engine whose answers are known."""

from __future__ import annotations

import asyncio
import json

import pytest

from http_answers import error_of, sse_chunks, strict_json
from scripted_engine import EOS_ID, ScriptedEngine, answer_text

PROMPT = "<user>hello\n<assistant>"


async def test_an_answer_has_the_documented_shape(client):
    body = strict_json((await client.chat(max_tokens=5)).text)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake"
    assert body["system_fingerprint"].startswith("fp_")
    assert isinstance(body["created"], int)
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": answer_text(PROMPT, 5), "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert body["usage"] == {
        "prompt_tokens": len(PROMPT), "completion_tokens": 5, "total_tokens": len(PROMPT) + 5,
        "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip


async def test_a_stream_joins_to_the_whole_answer(client):
    whole = strict_json((await client.chat(max_tokens=7)).text)
    chunks = sse_chunks(await client.chat(max_tokens=7, stream=True))
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[0]["system_fingerprint"] == whole["system_fingerprint"]


@pytest.mark.parametrize("script", [None, [ord("h"), ord("i"), EOS_ID]])
async def test_exactly_one_chunk_has_a_finish_reason(make_client, script):
    client = make_client(ScriptedEngine(script=script))
    chunks = sse_chunks(await client.chat(max_tokens=9, stream=True))
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert [r for r in reasons if r] == ["stop" if script else "length"]
    assert reasons[-1] is not None


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_obfuscation": True}])
async def test_usage_is_absent_from_a_stream_that_did_not_ask(client, options):
    chunks = sse_chunks(await client.chat(max_tokens=5, stream=True, stream_options=options))
    assert all(c.get("usage") is None for c in chunks)
    assert all(c["choices"] for c in chunks)


async def test_usage_comes_in_one_chunk_after_the_last_choice(client):
    chunks = sse_chunks(await client.chat(max_tokens=5, stream=True, stream_options={"include_usage": True}))
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert all(c.get("usage") is None for c in others)
    assert others[-1]["choices"][0]["finish_reason"] == "length"


async def test_running_totals_come_only_under_their_own_flag(client):
    chunks = sse_chunks(
        await client.chat(max_tokens=4, stream=True, stream_options={"continuous_usage_stats": True})
    )
    assert [c["usage"]["completion_tokens"] for c in chunks][-1] == 4
    assert all(c["choices"] for c in chunks)


async def test_stream_options_without_a_stream_are_refused(client):
    error_of(await client.chat(stream_options={"include_usage": True}), 400, param="stream_options")


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": True}, {"logprobs": True, "top_logprobs": 0}, {"logprobs": True, "top_logprobs": 5}],
)
async def test_logprobs_have_the_chat_layout_in_both_modes(client, fields):
    num_top = fields.get("top_logprobs", 0)
    whole = strict_json((await client.chat(max_tokens=4, **fields)).text)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    text = whole["choices"][0]["message"]["content"]
    for entry, character in zip(content, text, strict=True):
        assert entry["token"] == character
        assert entry["bytes"] == [ord(character)]
        assert entry["logprob"] == -0.5
        assert len(entry["top_logprobs"]) == num_top
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert tops == sorted(tops, reverse=True)
    chunks = sse_chunks(await client.chat(max_tokens=4, stream=True, **fields))
    streamed = [e for c in chunks if (lp := c["choices"][0]["logprobs"]) for e in lp["content"]]
    assert streamed == content


@pytest.mark.parametrize(
    "fields",
    [{"top_logprobs": 5}, {"logprobs": True, "top_logprobs": -1}, {"logprobs": True, "top_logprobs": 1000}],
)
async def test_impossible_top_logprobs_are_refused(client, fields):
    error = error_of(await client.chat(**fields), 400, param="top_logprobs")
    if fields["top_logprobs"] != 5:
        assert "20" in error["message"]


async def test_minus_infinity_becomes_a_finite_floor(make_client):
    client = make_client(ScriptedEngine(logprob=float("-inf")))
    body = strict_json((await client.chat(max_tokens=2, logprobs=True, top_logprobs=2)).text)
    entry = body["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == -9999.0
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-9999.0, -9999.0]


async def test_a_part_of_a_character_is_shown_by_its_bytes(make_client):
    client = make_client(ScriptedEngine(script=[0xF0, 0x9F]))
    body = strict_json((await client.chat(max_tokens=2, logprobs=True)).text)
    first = body["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == "bytes:\\xf0"
    assert first["bytes"] == [0xF0]


@pytest.mark.parametrize("stream", [False, True])
async def test_n_choices_are_kept_apart(client, stream):
    expected = [answer_text(PROMPT, 6, index) for index in range(4)]
    response = await client.chat(
        max_tokens=6, n=4, stream=stream, stream_options={"include_usage": True} if stream else None
    )
    if stream:
        texts, reasons = [""] * 4, [[] for _ in range(4)]
        *chunks, last = sse_chunks(response)
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["delta"].get("content", "")
            reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
        assert reasons == [["length"]] * 4
        usage = last["usage"]
    else:
        body = strict_json(response.text)
        assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
        texts, usage = [c["message"]["content"] for c in body["choices"]], body["usage"]
    assert texts == expected
    assert usage["completion_tokens"] == 24
    assert usage["prompt_tokens"] == len(PROMPT)


@pytest.mark.parametrize("when", [1, 3])
async def test_an_error_in_mid_stream_is_an_event_and_no_done(make_client, when):
    client = make_client(ScriptedEngine(fail_after=when))
    response = await client.chat(max_tokens=6, stream=True)
    assert response.status_code == 200
    events = [strict_json(e.removeprefix("data: ")) for e in response.text.split("\n\n") if e]
    assert events[-1]["error"]["code"] == "engine_error"
    assert "chatcmpl-" in events[-1]["error"]["message"]
    assert "[DONE]" not in response.text


async def test_an_engine_that_dies_breaks_off_the_stream_with_an_error(make_client):
    client = make_client(ScriptedEngine(die_after=2))
    response = await client.chat(max_tokens=6, stream=True)
    assert '"code":"engine_dead"' in response.text
    assert "[DONE]" not in response.text


async def test_text_parts_are_joined_and_other_parts_refused(client):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert (await client.chat(parts, max_tokens=1)).status_code == 200
    assert bytes(client.engine.seen[0]["prompt"]) == b"<user>one\ntwo\n<assistant>"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "text"},
        {"type": "text", "text": 5},
        {},
        "bare",
    ],
)
async def test_parts_that_are_no_text_are_400_and_fetch_nothing(client, part):
    error = error_of(
        await client.chat([{"type": "text", "text": "see"}, part]), 400, param="messages[0].content"
    )
    assert "text" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": "{% for _ in range(10**9) %}x{% endfor %}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (
            {"chat_template_kwargs": {"continue_final_message": True}},
            "chat_template_kwargs.continue_final_message",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"x": json.loads("[" * 70 + "]" * 70)}}, "chat_template_kwargs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(client, fields, param):
    error_of(await client.chat(**fields), 400, param=param)


@pytest.mark.parametrize("name", ["self", "template", "variables", "name", "range", "", "1", "a b"])
async def test_template_variables_may_have_any_other_name(client, name):
    response = await client.chat(chat_template_kwargs={name: "x"}, max_tokens=1)
    assert response.status_code == 200


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000, "[" * 900 + "]" * 900, "9" * 5000, "{", "1e999", "\ud7ff"]
)
async def test_arguments_of_a_past_call_that_are_no_plain_json_reach_the_template_as_text(
    make_client, arguments
):
    client = make_client(chat_template="{{ messages[0].tool_calls[0].function.arguments | string | length }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    response = await client.post(
        "/v1/chat/completions",
        json={"model": "fake", "messages": [{"role": "assistant", "tool_calls": [call]}], "max_tokens": 1},
    )
    assert response.status_code == 200


async def test_fields_that_change_nothing_are_accepted(client):
    response = await client.chat(
        max_tokens=2, user="u", metadata={"a": "b"}, store=False, service_tier="auto", response_format={"type": "text"},
        modalities=["text"], parallel_tool_calls=True, tool_choice="none", tools=[{"type": "function"}], functions=[],
        safety_identifier="s", prompt_cache_key="k", verbosity="medium", use_beam_search=False, length_penalty=1.0,
    )  # fmt: skip
    assert response.status_code == 200


async def test_extensions_reach_the_engine(client):
    sampling = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3],
        "bad_words": ["no"], "allowed_token_ids": [65], "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "seed": 7, "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.2, "stop": "x",
    }  # fmt: skip
    response = await client.chat(max_tokens=3, priority=-2, cache_salt="s", logit_bias={"5": 1.5}, **sampling)
    assert response.status_code == 200, response.text
    seen = client.engine.seen[0]
    assert (seen["priority"], seen["cache_salt"]) == (-2, "s")
    for name, value in sampling.items():
        assert getattr(seen["params"], name) == (["x"] if name == "stop" else value)
    assert seen["params"].logit_bias == {5: 1.5}


async def test_the_models_own_defaults_hold_where_the_caller_says_nothing(make_client):
    client = make_client(ScriptedEngine(generation_defaults={"temperature": 0.2, "top_k": 9}))
    await client.chat(max_tokens=1, top_k=4)
    params = client.engine.seen[0]["params"]
    assert (params.temperature, params.top_k, params.top_p) == (0.2, 4, 1.0)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [10**9, 2**63, 2**64, None])
async def test_max_tokens_above_the_room_means_all_of_the_room(client, field, value):
    body = strict_json((await client.chat(**{field: value})).text)
    assert body["usage"]["total_tokens"] == 128


async def test_roles_and_a_continued_answer_reach_the_template(client):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "bob"},
        {"role": "assistant", "content": "well"},
    ]
    body = {"model": "fake", "messages": messages, "max_tokens": 1, "continue_final_message": True}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert bytes(client.engine.seen[0]["prompt"]) == b"<system>be brief\n<user>hi\n<assistant>well"


async def test_prompt_logprobs_come_by_token_id(client):
    body = strict_json((await client.chat("a", max_tokens=1, prompt_logprobs=2)).text)
    positions = body["prompt_logprobs"]
    assert positions[0] is None
    assert len(positions) == body["usage"]["prompt_tokens"]
    assert positions[1][str(ord("u"))] == {"logprob": -0.5, "rank": 1, "decoded_token": "u"}


async def test_a_long_conversation_does_not_hold_up_others(make_client):
    client = make_client(ScriptedEngine(max_model_len=2**21))
    slow = asyncio.create_task(client.chat("word " * 200_000, max_tokens=1))
    assert (await client.get("/health")).status_code == 200
    assert (await slow).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_come_with_the_message_when_asked_for(make_client, stream):
    client = make_client(ScriptedEngine(script=[97, EOS_ID, 98]))
    response = await client.chat(max_tokens=5, stream=stream, return_token_ids=True)
    choices = (
        [choice for chunk in sse_chunks(response) for choice in chunk["choices"]]
        if stream
        else strict_json(response.text)["choices"]
    )
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [97, EOS_ID, 98]
