"""A real sentence embedder against sentence-transformers itself, and what embeddings are for.

``minilm_vectors.json`` holds the first 48 numbers of each of `TEXTS` as sentence-transformers 6.2.0 gives them:
``SentenceTransformer(folder).encode(TEXTS)[:, :48]``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from inferplane import LLM

TEXTS = ["A man is eating a meal.", "Someone has his dinner.", "The stock market fell sharply today."]

pytestmark = pytest.mark.slow


_NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(
    scope="module", params=["reference", "cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _NO_GPU])]
)
def llm(request: pytest.FixtureRequest, minilm_folder: Path) -> Iterator[LLM]:
    with LLM(str(minilm_folder), device=request.param, dtype="float32") as opened:
        yield opened


def test_vectors_equal_those_of_sentence_transformers(llm: LLM):
    expected = json.loads(Path(__file__).with_name("minilm_vectors.json").read_text())
    outputs = llm.embed(TEXTS, use_tqdm=False)
    found = np.stack([output.embedding for output in outputs])
    assert found.shape == (3, 384)
    np.testing.assert_allclose(found[:, :48], expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert llm.config.model.max_model_len == 256  # as its makers advise


def test_a_paraphrase_ranks_above_an_unrelated_text(llm: LLM):
    paraphrase, unrelated = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    assert paraphrase.score > 0.6 > 0.1 > unrelated.score
