"""Embeddings, classes, scores and rankings over HTTP, of an engine whose vectors count tokens."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest

from inferplane.config import PoolerConfig
from inferplane.engine.errors import QueueFullError
from inferplane.request import PoolingParams, PoolingTask
from scripted_engine import ScriptedEngine, pooled_vector

SIZE = 8
EMBEDDER = PoolerConfig(
    "mean",
    ("embed", "score"),
    max_dimensions=SIZE,
    dimensions=(4,),
    prompts={"query": "find: "},
)
CLASSIFIER = PoolerConfig("cls", ("classify",), labels=("no", "yes", "both"), activation="softmax")
CROSS_ENCODER = PoolerConfig("cls", ("classify", "score"), labels=("relevant",), activation="sigmoid")


@pytest.fixture
def embedder(make_client):
    return make_client(ScriptedEngine(pooler=EMBEDDER))


@pytest.fixture
def cross_encoder(make_client):
    return make_client(ScriptedEngine(pooler=CROSS_ENCODER))


async def post(client, route, status=200, **body):
    response = await client.post(route, json={"model": "fake", **body})
    assert response.status_code == status, response.text
    return response.json()


def vector(text: str) -> list[float]:
    return pooled_vector(list(text.encode()), SIZE)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("hello", ["hello"]),
        (["hello", "you"], ["hello", "you"]),
        ([104, 105], ["hi"]),
        ([[104, 105], [106]], ["hi", "j"]),
    ],
)
async def test_all_forms_of_input(embedder, given, texts):
    answer = await post(embedder, "/v1/embeddings", input=given)
    assert answer["object"] == "list" and answer["model"] == "fake" and answer["id"].startswith("embd-")
    assert [each["embedding"] for each in answer["data"]] == [vector(text) for text in texts]
    assert [(each["index"], each["object"]) for each in answer["data"]] == [
        (index, "embedding") for index in range(len(texts))
    ]
    num_tokens = sum(map(len, texts))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def test_base64_has_the_same_numbers(embedder):
    answer = await post(embedder, "/v1/embeddings", input="hello", encoding_format="base64")
    data = base64.b64decode(answer["data"][0]["embedding"])
    assert np.frombuffer(data, "<f4").tolist() == vector("hello")


async def test_what_is_asked_for_reaches_the_engine(embedder):
    await post(
        embedder,
        "/v1/embeddings",
        input="a",
        dimensions=4,
        normalize=False,
        priority=3,
        cache_salt="s",
        user="me",
    )
    seen = embedder.engine.seen[0]
    assert seen["params"] == PoolingParams(task=PoolingTask.EMBED, dimensions=4, normalize=False)
    assert (seen["priority"], seen["cache_salt"]) == (3, "s")


async def test_a_named_prompt_comes_before_texts_and_not_before_tokens(embedder):
    await post(embedder, "/v1/embeddings", input=["a"], prompt_name="query")
    await post(embedder, "/v1/embeddings", input=[97], prompt_name="query")
    assert [bytes(each["prompt"]) for each in embedder.engine.seen] == [b"find: a", b"a"]


async def test_large_answers_are_whole(make_client):
    engine = ScriptedEngine(pooler=PoolerConfig("mean", ("embed",), max_dimensions=4096))
    answer = await post(make_client(engine), "/v1/embeddings", input=["x"] * 40)
    assert [each["embedding"] for each in answer["data"]] == [pooled_vector([120], 4096)] * 40


async def test_classes(make_client):
    client = make_client(ScriptedEngine(pooler=CLASSIFIER))
    answer = await post(client, "/classify", input=["abc", "dd"])
    first, second = (pooled_vector(list(text), 3) for text in (b"abc", b"dd"))
    assert [each["probs"] for each in answer["data"]] == [first, second]
    assert [each["num_classes"] for each in answer["data"]] == [3, 3]
    assert answer["data"][1]["label"] == CLASSIFIER.labels[second.index(2.0)]
    await post(client, "/score", 400, text_1="a", text_2="b")


@pytest.mark.parametrize("route", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
async def test_a_cross_encoder_reads_pairs(cross_encoder, route, names):
    first, second = names
    answer = await post(cross_encoder, route, **{first: "ab", second: ["c", {"text": "def"}]})
    assert [(each["index"], each["object"], each["score"]) for each in answer["data"]] == [
        (0, "score", 3.0),
        (1, "score", 5.0),
    ]
    assert [bytes(each["prompt"]) for each in cross_encoder.engine.seen] == [b"abc", b"abdef"]
    assert answer["usage"]["total_tokens"] == 8


async def test_scores_of_an_embedder_are_cosines(embedder):
    answer = await post(embedder, "/score", text_1=["ab", "b"], text_2=["ab", "c"])
    assert [each["score"] for each in answer["data"]] == pytest.approx([1.0, 0.0])
    assert len(embedder.engine.seen) == 3  # each text once
    assert answer["usage"]["total_tokens"] == 4


@pytest.mark.parametrize("route", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_the_best_document_comes_first(cross_encoder, route):
    documents = ["a", "aaa", "aa"]
    answer = await post(cross_encoder, route, query="q", documents=documents)
    assert [each["index"] for each in answer["results"]] == [1, 2, 0]
    assert [each["relevance_score"] for each in answer["results"]] == [4.0, 3.0, 2.0]
    assert [each["document"]["text"] for each in answer["results"]] == ["aaa", "aa", "a"]
    few = await post(cross_encoder, route, query="q", documents=documents, top_n=1, return_documents=False)
    assert few["results"] == [{"index": 1, "relevance_score": 4.0}]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input"),
        ("/v1/embeddings", {"input": "x" * 500}, "input"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "input"),
        ("/v1/embeddings", {"input": [[100000]]}, "prompt"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "answer"}, "prompt_name"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "dimension": 4}, "dimension"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/classify", {"input": "a"}, "model"),
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "b", "queries": "c"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [5]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["x" * 500]}, "documents"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model"),
        ("/v1/completions", {"prompt": "a"}, "model"),
    ],
)
async def test_bad_requests_name_the_field(embedder, route, body, param):
    answer = await post(embedder, route, 400, **body)
    assert answer["error"]["param"] == param
    assert embedder.engine.seen == []


async def test_a_text_that_is_too_long_says_so(embedder):
    answer = await post(embedder, "/v1/embeddings", 400, input="x" * 129)
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "has 129 tokens, but the context length is 128 tokens" in answer["error"]["message"]
    await post(embedder, "/v1/embeddings", input="x" * 128)


async def test_an_unknown_model_is_404(embedder):
    response = await embedder.post("/v1/embeddings", json={"model": "other", "input": "a"})
    assert response.status_code == 404


async def test_failures_have_their_status(make_client):
    full = make_client(ScriptedEngine(pooler=EMBEDDER, refusal=QueueFullError("16 requests wait")))
    await post(full, "/v1/embeddings", 503, input=["a", "b"])
    failing = make_client(ScriptedEngine(pooler=EMBEDDER, fail_after=0))
    answer = await post(failing, "/v1/embeddings", 500, input=["a", "b"])
    assert "a planned fault" in answer["error"]["message"]


async def test_requests_are_counted(embedder):
    await post(embedder, "/v1/embeddings", input=["abc", "de"])
    await post(embedder, "/score", text_1="a", text_2="b")
    text = (await embedder.get("/metrics")).text
    assert 'inferplane_pooling_requests_total{task="embed"} 2.0' in text
    assert 'inferplane_pooling_requests_total{task="score"} 2.0' in text
    assert "inferplane_prompt_tokens_total 7.0" in text
    assert "inferplane_request_duration_seconds_count 4.0" in text


async def test_a_caller_who_leaves_ends_the_work(make_client):
    client = make_client(ScriptedEngine(pooler=EMBEDDER, delay_s=60))
    asking = asyncio.create_task(post(client, "/v1/embeddings", input=["a", "b"]))
    while len(client.engine.running) < 2:
        await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not client.engine.running and len(client.engine.aborted) == 2
    assert "inferplane_requests_aborted_total 2.0" in (await client.get("/metrics")).text


async def test_the_card_tells_the_tasks(embedder):
    [card] = (await embedder.get("/v1/models")).json()["data"]
    assert card["tasks"] == ["embed", "score"]
