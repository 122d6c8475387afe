"""Every refusal has OpenAI's envelope, a fitting status, and a message for people."""

from __future__ import annotations

import pytest

from http_answers import error_of
from inferplane.engine.errors import EngineDeadError, EngineDrainingError, QueueFullError
from inferplane.request import ParameterError
from scripted_engine import ScriptedEngine

POOLING = ["/v1/embeddings", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"]
POST_ROUTES = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", *POOLING]
GENERATING = ["/v1/completions", "/v1/chat/completions"]
MINIMAL = {
    "/v1/completions": {"model": "fake", "prompt": "hi"},
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("route", POST_ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"nonsense",
        b'{"a": NaN}',
        b'{"a": 1e400}',
        b'{"a": "\\ud800"}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
async def test_broken_json_is_400(client, route, body):
    response = await client.post(route, content=body, headers={"Content-Type": "application/json"})
    error_of(response, 400, code="invalid_json")


@pytest.mark.parametrize("route", POST_ROUTES)
@pytest.mark.parametrize("body", [b"[]", b'"text"', b"3", b"null"])
async def test_a_body_that_is_no_object_is_400(client, route, body):
    error_of(
        await client.post(route, content=body, headers={"Content-Type": "application/json"}),
        400,
        code="invalid_json",
    )


@pytest.mark.parametrize("route", POST_ROUTES)
async def test_another_content_type_is_415(client, route):
    response = await client.post(
        route, content=b"prompt=hi", headers={"Content-Type": "application/x-www-form-urlencoded"}
    )
    error = error_of(response, 415)
    assert "application/json" in error["message"]


@pytest.mark.parametrize("route", POST_ROUTES)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD"])
async def test_another_method_is_405(client, route, method):
    response = await client.request(method, route)
    assert response.status_code == 405
    assert "POST" in response.headers["allow"]
    if method != "HEAD":
        error_of(response, 405)


@pytest.mark.parametrize(
    "path", ["/", "/nothing", "/v1", "/v1/chat", "/v1/completions/", "//health", "/v1/responses"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_route_is_404(client, path, method):
    error_of(await client.request(method, path, json={}), 404, code="unknown_url")


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/chat/completions", {}, "messages"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages"),
        ("/v1/chat/completions", {"messages": [{}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
        ("/v1/completions", {"prompt": [[1], 2]}, "prompt"),
        ("/v1/completions", {"prompt": {"text": "x"}}, "prompt"),
        ("/v1/completions", {"prompt": 7}, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 1025}, "prompt"),
        ("/v1/completions", {"prompt": ["x"] * 1000, "n": 128}, "n"),
        ("/v1/completions", {"prompt": [99999]}, "prompt"),
        ("/v1/completions", {"prompt": [2**70]}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
    ],
)  # fmt: skip
async def test_a_field_that_is_missing_or_misshapen_is_named(client, route, body, param):
    error_of(await client.post(route, json={"model": "fake", **body}), 400, param=param)


@pytest.mark.parametrize("route", GENERATING)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("temperature", 999999), ("temperature", True),
        ("temperature", []),
        ("top_p", 0), ("top_p", 2), ("top_p", -1), ("top_k", -5), ("top_k", 10**12), ("top_k", 1.5),
        ("min_p", 2), ("repetition_penalty", 0), ("presence_penalty", 99), ("frequency_penalty", -99),
        ("n", 0), ("n", 100_000), ("n", "2"), ("n", -1), ("seed", 2**70), ("seed", 1.5),
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "many"), ("min_tokens", -1),
        ("stop", [""]), ("stop", ["x"] * 17), ("stop", 5), ("stop", [1]), ("stop_token_ids", ["a"]),
        ("stop_token_ids", [99999]),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("bad_words", [""]),
        ("logit_bias", {"99999999": 5}), ("logit_bias", {"-1": 5}), ("logit_bias", {"abc": 5}),
        ("logit_bias", {"5": "x"}), ("logit_bias", {"--5": 1}), ("logit_bias", {"-": 1}),
        ("logit_bias", {"9" * 5000: 1}), ("logit_bias", {"\u0661": 1}),
        ("logit_bias", {"5": 1000}), ("logit_bias", {str(i): 1 for i in range(2000)}), ("logit_bias", [1]),
        ("stream", "yes"), ("ignore_eos", "no"), ("priority", "high"), ("logits_processors", 5),
        ("prompt_logprobs", -1),
    ],
)  # fmt: skip
async def test_sampling_values_out_of_range_are_400_and_named(client, route, field, value):
    response = await client.post(route, json={**MINIMAL[route], field: value})
    error = error_of(response, 400)
    assert error["param"].startswith(field)
    assert field in error["message"]


@pytest.mark.parametrize("route", GENERATING)
async def test_an_unknown_field_is_refused_with_a_guess(client, route):
    error = error_of(
        await client.post(route, json={**MINIMAL[route], "temprature": 0}), 400, param="temprature"
    )
    assert "'temperature'" in error["message"]


@pytest.mark.parametrize("route", POST_ROUTES[:4])
async def test_the_name_of_an_unknown_field_is_not_repeated_at_length(client, route):
    response = await client.post(route, json={"prompt": "x", "temperatur" * 20_000: 0})
    error_of(response, 400)
    assert len(response.content) < 1000


@pytest.mark.parametrize("route", GENERATING)
async def test_a_deep_argument_of_a_plugin_is_refused_by_name(client, route):
    body = {**MINIMAL[route], "logits_processors": {"x": _nested(70)}}
    error = error_of(await client.post(route, json=body), 400, param="logits_processors")
    assert "64" in error["message"]


def _nested(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("route", GENERATING)
async def test_null_means_not_given(client, route):
    fields = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "max_tokens",
        "seed",
        "stream",
        "logit_bias",
        "tools",
        "logits_processors",
        "x",
    ]
    response = await client.post(route, json={**MINIMAL[route], **dict.fromkeys(fields), "max_tokens": 3})
    assert response.status_code == 200


@pytest.mark.parametrize("route", [*GENERATING, "/v1/embeddings"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["no-such-model", None])
async def test_an_unknown_model_is_404_before_any_event(client, route, stream, name):
    body = {**MINIMAL.get(route, {"input": "x"}), "model": name}
    if route in GENERATING:
        body["stream"] = stream
    error = error_of(await client.post(route, json=body), 404, code="model_not_found", param="model")
    assert "'fake'" in error["message"]


@pytest.mark.parametrize(
    ("route", "body", "what"),
    [
        ("/v1/embeddings", {"input": "x"}, "embed texts"),
        ("/classify", {"input": "x"}, "classify texts"),
        ("/score", {"text_1": "x", "text_2": "y"}, "score pairs of texts"),
        ("/v2/rerank", {"query": "x", "documents": ["y"]}, "score pairs of texts"),
    ],
)
async def test_a_model_that_generates_refuses_to_pool(client, route, body, what):
    response = await client.post(route, json={"model": "fake", **body})
    error = error_of(response, 400, code="unsupported_endpoint", param="model")
    assert error["message"] == f"the model cannot {what}: it is loaded to generate text"


@pytest.mark.parametrize("route", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (QueueFullError("16 requests wait, which is the limit"), 503, "queue_full"),
        (EngineDrainingError(), 503, "queue_full"),
        (EngineDeadError("it ended"), 503, "engine_dead"),
        (ParameterError("logits_processors", "unknown logits processor x"), 400, "invalid_value"),
        (RuntimeError("a secret detail"), 500, None),
    ],
)
async def test_refusals_of_the_engine_have_a_status_in_both_modes(
    make_client, route, stream, refusal, status, code
):
    client = make_client(ScriptedEngine(refusal=refusal))
    response = await client.post(route, json={**MINIMAL[route], "stream": stream})
    error = error_of(response, status, code=code)
    assert "secret" not in error["message"]
    if status == 503:
        assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("route", GENERATING)
async def test_an_error_of_one_request_is_500_with_its_id_and_leaves_others_alone(make_client, route):
    engine = ScriptedEngine(fail_after=2)
    client = make_client(engine)
    error = error_of(
        await client.post(route, json={**MINIMAL[route], "max_tokens": 9}), 500, code="engine_error"
    )
    assert "a planned fault" in error["message"]
    assert "cmpl-" in error["message"]
    engine.fail_after = None
    assert (await client.post(route, json=MINIMAL[route])).status_code == 200
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("length", [127, 128, 129, 5000])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_too_long_from_the_context_length_on(client, length, stream):
    response = await client.complete([65] * length, max_tokens=1, stream=stream)
    if length == 127:
        assert response.status_code == 200
    else:
        error = error_of(response, 400, code="context_length_exceeded")
        assert str(length) in error["message"]
        assert "128" in error["message"]


async def test_a_chat_that_is_too_long_is_told_apart(client):
    error = error_of(await client.chat("x" * 500), 400, code="context_length_exceeded")
    assert "128" in error["message"]


async def test_one_prompt_too_long_refuses_the_batch_before_any_of_it_runs(client):
    response = await client.complete(["fine", "x" * 500], stream=True)
    error_of(response, 400, code="context_length_exceeded")
    assert client.engine.seen == []


@pytest.mark.parametrize("stream", [False, True])
async def test_text_that_cannot_but_be_too_long_is_not_even_encoded(client, monkeypatch, stream):
    monkeypatch.setattr(type(client.engine), "encode_prompt", None)
    text = "x" * 2**17
    for response in (await client.complete([text], stream=stream), await client.chat(text, stream=stream)):
        error = error_of(response, 400, code="context_length_exceeded")
        assert "or more tokens" in error["message"]


@pytest.mark.parametrize("prompt", ["", [""], [[]], ["a", ""], [[65], []]])
async def test_an_empty_prompt_is_400(client, prompt):
    error_of(await client.complete(prompt), 400, param="prompt")


async def test_an_empty_message_is_a_message(client):
    assert (await client.chat("", max_tokens=2)).status_code == 200


async def test_a_body_above_the_limit_is_413(make_client):
    client = make_client(max_body_bytes=1000)
    error = error_of(await client.chat("x" * 2000), 413)
    assert "1000" in error["message"]

    async def without_declared_length():
        yield b'{"model": "fake", "prompt": "'
        yield b"x" * 2000
        yield b'"}'

    response = await client.post(
        "/v1/completions", content=without_declared_length(), headers={"Content-Type": "application/json"}
    )
    error_of(response, 413)


async def test_a_model_without_a_template_refuses_chat_and_completes_text(make_client):
    client = make_client(ScriptedEngine(template=None))
    error = error_of(await client.chat("hi"), 400)
    assert "--chat-template" in error["message"]
    assert (await client.complete("hi")).status_code == 200


async def test_an_operator_template_takes_the_place_of_the_models(make_client):
    client = make_client(chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}")
    await client.chat("hi", max_tokens=1)
    assert bytes(client.engine.seen[0]["prompt"]) == b"[hi]"


async def test_messages_that_the_template_refuses_are_400(make_client):
    client = make_client(chat_template="{{ raise_exception('roles must alternate') }}")
    error = error_of(await client.chat("hi"), 400)
    assert "roles must alternate" in error["message"]
