"""The official client against a running server: what it sends is taken, what it gets it understands."""

from __future__ import annotations

import asyncio
import math
import time

import openai
import pytest

from .conftest import MODEL

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": MODEL, "temperature": 0}


def chat_text(chunks) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_knows_the_capital(client):
    completion = client.chat.completions.create(messages=FRANCE, max_tokens=32, **GREEDY)
    assert "Paris" in completion.choices[0].message.content
    assert completion.choices[0].finish_reason == "stop"
    assert (
        completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    )
    assert completion.system_fingerprint


def test_chat_streamed_equals_chat_whole(client):
    whole = client.chat.completions.create(messages=FRANCE, max_tokens=24, **GREEDY)
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            messages=FRANCE, max_tokens=24, stream=True, stream_options=options, **GREEDY
        )
    )
    assert chat_text(chunks) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completion_streamed_equals_completion_whole(client):
    whole = client.completions.create(prompt="The sea is", max_tokens=20, **GREEDY)
    chunks = list(client.completions.create(prompt="The sea is", max_tokens=20, stream=True, **GREEDY))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert whole.usage.completion_tokens == 20


async def test_async_client_streams_side_by_side(async_client):
    async def ask(prompt: str) -> str:
        text = ""
        async for chunk in await async_client.completions.create(
            prompt=prompt, max_tokens=12, stream=True, **GREEDY
        ):
            text += chunk.choices[0].text
        return text

    prompts = [f"Number {i} is followed by" for i in range(8)]
    together = await asyncio.gather(*map(ask, prompts))
    alone = [
        (await async_client.completions.create(prompt=p, max_tokens=12, **GREEDY)).choices[0].text
        for p in prompts
    ]
    assert together == alone


@pytest.mark.parametrize("arguments", [{}, {"n": 4}, {"prompt": ["One", "Two"]}, {"stream": True}])
async def test_a_caller_who_hangs_up_stops_the_work(async_client, server, arguments):
    more = {"prompt": "Once", "max_tokens": 4000, "extra_body": {"ignore_eos": True}, **GREEDY, **arguments}
    num_aborted = server.metric("requests_aborted_total")
    asking = asyncio.create_task(async_client.completions.create(**more))
    while not await asyncio.to_thread(server.metric, "requests_running"):
        await asyncio.sleep(0.02)
    if arguments.get("stream"):
        await (await asking).close()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    left_s = time.monotonic()
    while server.metric("requests_running") or server.metric("requests_waiting"):
        assert time.monotonic() - left_s < 2
        await asyncio.sleep(0.05)
    assert server.metric("requests_aborted_total") == num_aborted + len(
        more["prompt"] if "prompt" in arguments else "1"
    )
    assert server.metric("kv_blocks_free") == server.metric("kv_blocks")


@pytest.mark.parametrize("num_top", [None, 0, 5])
def test_chat_logprobs(client, num_top):
    completion = client.chat.completions.create(
        messages=FRANCE, max_tokens=6, logprobs=True, top_logprobs=num_top, **GREEDY
    )
    content = completion.choices[0].logprobs.content
    assert len(content) == completion.usage.completion_tokens
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == (num_top or 0)
        if num_top:
            assert entry.top_logprobs[0].logprob == entry.logprob  # greedy takes the best
            values = [top.logprob for top in entry.top_logprobs]
            assert values == sorted(values, reverse=True)
    streamed = client.chat.completions.create(
        messages=FRANCE, max_tokens=6, logprobs=True, top_logprobs=num_top, stream=True, **GREEDY
    )
    entries = [e for chunk in streamed for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    assert [e.token for e in entries] == [e.token for e in content]
    assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in content], abs=1e-4)


def test_a_banned_token_has_a_finite_logprob(client):
    best = client.chat.completions.create(messages=FRANCE, max_tokens=1, logprobs=True, **GREEDY).choices[0]
    (token_id,) = client.post(
        "/../tokenize", cast_to=object, body={"prompt": best.message.content, "add_special_tokens": False}
    )["tokens"]
    completion = client.chat.completions.create(
        messages=FRANCE,
        max_tokens=3,
        logprobs=True,
        top_logprobs=5,
        logit_bias={str(token_id): -100},
        **GREEDY,
    )
    for entry in completion.choices[0].logprobs.content:
        assert all(math.isfinite(top.logprob) for top in (entry, *entry.top_logprobs))
    assert completion.choices[0].logprobs.content[0].token != best.message.content


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_echo_scores_the_prompt(client, max_tokens):
    prompt = "The capital of France is"
    completion = client.completions.create(
        prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, **GREEDY
    )
    (choice,) = completion.choices
    assert choice.text.startswith(prompt)
    logprobs = choice.logprobs
    num = completion.usage.prompt_tokens + completion.usage.completion_tokens
    assert completion.usage.completion_tokens == max_tokens
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == num
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    for offset, token in zip(logprobs.text_offset, logprobs.tokens):
        assert choice.text[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices(client, stream):
    arguments = {"model": MODEL, "messages": FRANCE, "n": 4, "seed": 7, "temperature": 1.0, "max_tokens": 12}
    runs = []
    for _ in range(2):
        answer = client.chat.completions.create(stream=stream, **arguments, extra_body={"ignore_eos": True})
        if stream:
            texts = [""] * 4
            for choice in (choice for chunk in answer for choice in chunk.choices):
                texts[choice.index] += choice.delta.content or ""
        else:
            assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
            assert answer.usage.completion_tokens == 48
            texts = [choice.message.content for choice in answer.choices]
        runs.append(texts)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


def test_a_stop_string_ends_the_text_before_it_in_both_modes(client):
    prompt = "Count: one, two, three, four,"
    whole = (
        client.completions.create(prompt=prompt, max_tokens=40, extra_body={"ignore_eos": True}, **GREEDY)
        .choices[0]
        .text
    )
    stop = whole[7:13]  # begins and ends inside of tokens
    expected = whole[: whole.index(stop)]
    stopped = client.completions.create(prompt=prompt, max_tokens=40, stop=stop, **GREEDY)
    assert stopped.choices[0].text == expected
    assert stopped.choices[0].finish_reason == "stop"
    chunks = list(client.completions.create(prompt=prompt, max_tokens=40, stop=[stop], stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    included = client.completions.create(
        prompt=prompt, max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True}, **GREEDY
    )
    assert included.choices[0].text == expected + stop


@pytest.mark.parametrize("text", ["🙂", "你好", "é"])
def test_parts_of_characters_give_the_same_text_in_both_modes(client, text):
    """The only tokens allowed are parts of characters, which come in any order."""
    tokens = client.post("/../tokenize", cast_to=object, body={"prompt": text, "add_special_tokens": False})[
        "tokens"
    ]
    sampling = {"model": MODEL, "prompt": "Hi", "temperature": 1.0, "seed": 5, "max_tokens": 12}
    extra = {"allowed_token_ids": tokens, "ignore_eos": True}
    whole = client.completions.create(**sampling, extra_body=extra)
    chunks = client.completions.create(**sampling, stream=True, extra_body=extra)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage.completion_tokens == 12


@pytest.mark.parametrize("stream", [False, True])
def test_errors_reach_the_caller_as_the_clients_own(client, stream):
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=99999, stream=stream)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match=MODEL) as missing:
        client.chat.completions.create(model="no-such-model", messages=FRANCE, stream=stream)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="8192") as too_long:
        client.completions.create(prompt=[1] * 8192, stream=stream, **GREEDY)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="tools"):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        client.chat.completions.create(messages=FRANCE, tools=[tool], stream=stream, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            messages=FRANCE, response_format={"type": "json_object"}, stream=stream, **GREEDY
        )
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(prompt="a", suffix="b", stream=stream, **GREEDY)


def test_embeddings_of_a_model_that_generates_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="loaded to generate text"):
        client.embeddings.create(model=MODEL, input="x")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="no-such-model", input="x")


@pytest.mark.parametrize("key", ["wrong", ""])
def test_a_wrong_key_is_refused(client, key):
    stranger = client.with_options(api_key=key or "x")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(messages=FRANCE, **GREEDY)


def test_the_key_is_in_no_log(client, server):
    client.models.list()
    assert "sk-integration" not in server.log


@pytest.mark.parametrize("value", [10**9, 2**63, None])
def test_huge_max_tokens_are_cut_to_the_room(client, value):
    completion = client.chat.completions.create(messages=FRANCE, max_tokens=value, **GREEDY)
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("value", [-1, 1.5, 0])
def test_impossible_max_tokens_are_refused(client, value):
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.chat.completions.create(messages=FRANCE, max_tokens=value, **GREEDY)


def test_cached_prompt_tokens_are_reported(client):
    prompt = (  # longer than a block
        "A sentence that nobody has sent to this server before, in twenty-odd tokens or a few more than that, and "
        "then another one of about the same length, so that both together fill one block of any usual size."
    )
    first, second = (client.completions.create(prompt=prompt, max_tokens=2, **GREEDY) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
    assert first.choices[0].text == second.choices[0].text
