"""The official client asks a running server for embeddings; what it gets is what the model gives offline."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from inferplane import LLM
from server_process import ServerProcess
from tiny_poolers import MAX_LEN, make_tiny_pooler

TEXTS = ["a text", "the license of the work", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pooler")
    return make_tiny_pooler("BertModel", directory, pooling="cls_token", matryoshka_dimensions=[32])


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder, "--device", "reference", "--served-model-name", "tiny") as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    with LLM(str(folder), device="reference") as llm:
        return np.stack([output.embedding for output in llm.embed(TEXTS, use_tqdm=False)])


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_embeddings(client: openai.OpenAI, expected: np.ndarray, options: dict[str, str]):
    """The client asks for base64 by itself, and decodes it."""
    answer = client.embeddings.create(model="tiny", input=TEXTS, **options)
    found = [each.embedding for each in answer.data]
    if options.get("encoding_format") == "base64":
        found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > len(TEXTS)


def test_shorter_embeddings(client: openai.OpenAI, expected: np.ndarray):
    answer = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=32)
    short = expected[0, :32]
    np.testing.assert_allclose(answer.data[0].embedding, short / np.linalg.norm(short), atol=1e-6)


def test_what_cannot_be_had_is_refused_by_name(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input=[[5] * (MAX_LEN + 1)])
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input="a", dimensions=7)
    assert caught.value.param == "dimensions"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "unsupported_endpoint"


def test_many_at_once_and_a_ranking(server: ServerProcess, expected: np.ndarray):
    answer = httpx.post(
        f"{server.url}/rerank", json={"model": "tiny", "query": TEXTS[0], "documents": TEXTS}, timeout=60
    ).json()
    assert answer["results"][0]["index"] == 0
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    np.testing.assert_allclose([found[index] for index in range(3)], expected @ expected[0], atol=1e-6)
    many = httpx.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": [[7]] * 500}, timeout=60)
    vectors = np.array([each["embedding"] for each in many.json()["data"]])
    # steps of other sizes round otherwise
    np.testing.assert_allclose(vectors, np.broadcast_to(vectors[0], (500, 64)), atol=1e-6)
    assert server.metric(r'pooling_requests_total\{task="embed"\}') >= 500
