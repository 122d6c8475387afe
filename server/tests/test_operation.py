"""Health, metrics, models, tokenizer routes, and what happens while starting, draining and dying."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from http_answers import error_of, strict_json
from scripted_engine import ScriptedEngine


async def _figures(client) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {s.name + "".join(f":{v}" for v in s.labels.values()): s.value for s in samples}


async def test_health_follows_the_engine(make_client):
    engine = ScriptedEngine(is_ready=False)
    client = make_client(engine)
    error_of(await client.get("/health"), 503, code="starting")
    error_of(await client.complete("a"), 503, code="starting")
    engine.is_ready = True
    assert strict_json((await client.get("/health")).text) == {"status": "ok"}
    assert (await client.head("/health")).status_code == 200
    engine.fault = "no sign of life for 30 s"
    error = error_of(await client.get("/health"), 503, code="engine_dead")
    assert "30 s" in error["message"]
    error_of(await client.chat("a"), 503, code="engine_dead")
    engine.fault = None
    assert (await client.get("/health")).status_code == 200


async def test_while_draining_what_is_in_flight_finishes_and_new_requests_are_refused(make_client):
    client = make_client(ScriptedEngine(delay_s=0.02))
    lifecycle = client.service.lifecycle
    running = asyncio.create_task(client.chat(max_tokens=10, stream=True))
    await asyncio.sleep(0.1)
    lifecycle.begin_drain()
    for response in (await client.chat(), await client.complete(), await client.get("/health")):
        error_of(response, 503, code="draining")
        assert "retry-after" in response.headers
    assert not await lifecycle.wait_idle(0.01)
    assert await lifecycle.wait_idle(5)
    assert (await running).text.endswith("data: [DONE]\n\n")


async def test_a_text_that_no_context_could_hold_is_not_tokenized(client):
    long = "a" * 200_000
    for route, body in (
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/completions", {"prompt": long}),
    ):
        response = await client.post(route, json={"model": "fake", **body})
        error_of(response, 400, code="context_length_exceeded", param="prompt")
    # a text that is too long for a prompt may still be counted
    response = await client.post("/tokenize", json={"prompt": "a" * 1000})
    assert strict_json(response.text)["count"] == 1000


async def test_metrics_count_what_happened(client):
    await client.chat("abc", max_tokens=5)
    await client.complete(["a", "b"], max_tokens=4, n=2)
    figures = await _figures(client)
    assert figures["inferplane_generation_tokens_total"] == 5 + 16
    assert figures["inferplane_requests_success_total:length"] == 5
    assert figures["inferplane_requests_success_total:stop"] == 0
    assert figures["inferplane_time_to_first_token_seconds_count"] == 3
    assert figures["inferplane_inter_token_latency_seconds_count"] == 4 + 4 * 3
    assert figures["inferplane_request_duration_seconds_count"] == 3
    assert figures["inferplane_requests_aborted_total"] == 0
    assert figures["inferplane_requests_running"] == 0
    assert figures["inferplane_kv_blocks"] == figures["inferplane_kv_blocks_free"] == 64


async def test_gauges_are_read_at_the_scrape(make_client):
    client = make_client(ScriptedEngine(delay_s=0.05))
    running = [asyncio.create_task(client.chat(max_tokens=50)) for _ in range(5)]
    await asyncio.sleep(0.2)
    assert (await _figures(client))["inferplane_requests_running"] == 5
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    client.engine.running.clear()
    assert (await _figures(client))["inferplane_requests_running"] == 0


async def test_failures_are_counted_apart(make_client):
    client = make_client(ScriptedEngine(fail_after=1))
    await client.chat(max_tokens=5)
    figures = await _figures(client)
    assert figures["inferplane_requests_failed_total"] == 1
    assert figures["inferplane_requests_aborted_total"] == 0


async def test_models_list_the_names_that_are_accepted(make_client):
    client = make_client(served_model_names=("one", "org/two"))
    body = strict_json((await client.get("/v1/models")).text)
    assert [card["id"] for card in body["data"]] == ["one", "org/two"]
    assert body["data"][0]["max_model_len"] == 128
    assert strict_json((await client.get("/v1/models/org/two")).text)["id"] == "org/two"
    error_of(await client.get("/v1/models/three"), 404, code="model_not_found")
    for name, status in (("one", 200), ("org/two", 200), ("fake", 404)):
        assert (await client.complete("a", model=name)).status_code == status


async def test_version(client):
    assert strict_json((await client.get("/version")).text)["version"]


async def test_tokenize_text_and_back(client):
    body = strict_json(
        (await client.post("/tokenize", json={"prompt": "né", "return_token_strs": True})).text
    )
    assert body == {
        "count": 3, "max_model_len": 128, "tokens": [110, 0xC3, 0xA9],
        "token_strs": ["n", "bytes:\\xc3", "bytes:\\xa9"],
    }  # fmt: skip
    back = await client.post("/detokenize", json={"tokens": body["tokens"]})
    assert strict_json(back.text) == {"prompt": "né"}


async def test_tokenize_messages_gives_what_chat_uses(client):
    messages = [{"role": "user", "content": "hello"}]
    body = strict_json((await client.post("/tokenize", json={"messages": messages})).text)
    await client.chat("hello", max_tokens=1)
    assert body["tokens"] == client.engine.seen[0]["prompt"]


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs"])
async def test_tokenize_takes_no_template(client, field):
    value = "{{ x }}" if field == "chat_template" else {"chat_template": "x"}
    error_of(
        await client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}], field: value}),
        400,
    )


async def test_the_documentation_of_the_api_is_whole(client):
    document = strict_json((await client.get("/openapi.json")).text)
    assert "#/$defs" not in str(document)
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert "messages" in body["content"]["application/json"]["schema"]["properties"]
