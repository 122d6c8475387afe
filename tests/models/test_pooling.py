"""Models that pool against transformers in float32, through the engine: ragged batches, long inputs, chunks, pairs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_models
from inferplane import LLM
from inferplane.api.comm import Communicator
from inferplane.config import ConfigError, PoolerConfig
from inferplane.engine.errors import PromptTooLongError, TaskError
from inferplane.models.task import task_of
from inferplane.request import ParameterError, PoolingParams
from model_harness import PromptRun, load_tiny, run_ranks
from tiny_poolers import MAX_LEN, POOLERS, make_tiny_pooler, write_pooling

TOLERANCE = 1e-5
LENGTHS = (1, 17, 40, MAX_LEN, 70, 5)
EMBEDDERS = [name for name in POOLERS if task_of(name) == "embed"]
CLASSIFIERS = [name for name in POOLERS if task_of(name) == "classify"]
ENCODERS = [name for name in POOLERS if "Bert" in name or "Roberta" in name]

pytestmark = pytest.mark.usefixtures("no_step_raises")


@cache
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4, tiny_models.VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("poolers")
    return cache(lambda architecture: make_tiny_pooler(architecture, directory))


def open_llm(folder: Path, **arguments: Any) -> LLM:
    return LLM(str(folder), device="reference", kv_cache_bytes=8 << 20, **arguments)


def hidden_states(folder: Path, architecture: str) -> list[torch.Tensor]:
    """[num_tokens, hidden_size] of each prompt, by transformers."""
    import transformers

    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    base = model.base_model
    with torch.inference_mode():
        return [base(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts()]


def pooled(hidden: torch.Tensor, kind: str) -> np.ndarray:
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[kind]
    return torch.nn.functional.normalize(vector, dim=0).numpy()


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= TOLERANCE * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("architecture", EMBEDDERS)
def test_hidden_states_equal_those_of_transformers(architecture: str, folder_of: Callable[[str], Path]):
    """Of every token, in one ragged batch."""
    folder = folder_of(architecture)
    model = load_tiny(folder, pooler=PoolerConfig("mean", ("embed",)))
    for ours, theirs in zip(
        PromptRun(model).logits(prompts()), hidden_states(folder, architecture), strict=True
    ):
        assert_close(ours.numpy(), theirs.numpy())


def test_a_modernbert_as_it_was_first_published(tmp_path: Path):
    """Its configuration had a period in place of a list of layers, and two thetas in place of rope settings."""
    folder = make_tiny_pooler("ModernBertModel", tmp_path)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key in ("layer_types", "rope_parameters"):
        del config[key]
    older = {"global_attn_every_n_layers": 2, "global_rope_theta": 5000.0, "local_rope_theta": 300.0}
    file.write_text(json.dumps({**config, **older}))
    model = load_tiny(folder, pooler=PoolerConfig("mean", ("embed",)))
    expected = hidden_states(folder, "ModernBertModel")
    for ours, theirs in zip(PromptRun(model).logits(prompts()), expected, strict=True):
        assert_close(ours.numpy(), theirs.numpy())


@pytest.mark.parametrize("architecture", ["BertModel", "ModernBertModel", "MistralModel"])
def test_embeddings_equal_those_of_transformers(architecture: str, folder_of: Callable[[str], Path]):
    folder = folder_of(architecture)
    kind = "mean" if architecture in ENCODERS else "last"
    expected = [pooled(hidden, kind) for hidden in hidden_states(folder, architecture)]
    with open_llm(folder, max_num_batched_tokens=MAX_LEN, max_num_seqs=4) as llm:
        for output, vector in zip(llm.embed(prompts(), use_tqdm=False), expected, strict=True):
            assert_close(output.embedding, vector)


@pytest.mark.parametrize("kind", ["mean", "cls", "last"])
def test_prompts_in_chunks_pool_as_whole_ones(kind: str, tmp_path: Path):
    mode = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}[kind]
    folder = make_tiny_pooler("Qwen3Model", tmp_path, pooling=mode)
    expected = [pooled(hidden, kind) for hidden in hidden_states(folder, "Qwen3Model")]
    with open_llm(folder, max_num_batched_tokens=32, max_num_seqs=3, async_scheduling=kind == "mean") as llm:
        for _ in range(2):  # the second time with a warm prefix cache, where there is one
            for output, vector in zip(llm.embed(prompts(), use_tqdm=False), expected, strict=True):
                assert_close(output.embedding, vector)
        assert (llm.stats().num_prefix_hit_tokens > 0) == (kind == "last")


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_class_logits_equal_those_of_transformers(architecture: str, folder_of: Callable[[str], Path]):
    import transformers

    folder = folder_of(architecture)
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
    budget = None if architecture in ENCODERS else 32
    with open_llm(folder, max_num_batched_tokens=budget) as llm:
        raw = llm.classify(prompts(), use_activation=False, use_tqdm=False)
        likely = llm.classify(prompts(), use_tqdm=False)
    for found, probs, theirs in zip(raw, likely, logits, strict=True):
        assert_close(found.probs, theirs.numpy())
        expected = theirs.sigmoid() if len(theirs) == 1 else theirs.softmax(-1)
        assert_close(probs.probs, expected.numpy())
        assert probs.label == f"LABEL_{int(theirs.argmax())}"


def test_pairs_have_types(tmp_path: Path):
    """A tokenizer with a template for pairs, as BERT's have; the second text's tokens are of type 1."""
    import transformers
    from tokenizers import Tokenizer, processors

    folder = make_tiny_pooler("BertForSequenceClassification", tmp_path, num_labels=1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tiny_models.TURN_END
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B:1 {end}:1", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    query, documents = (
        "who may copy it?",
        ["everybody may copy", "a river", "the license says who may copy it"],
    )
    expected = []
    for document in documents:
        encoding = tokenizer.encode(query, document)
        assert set(encoding.type_ids) == {0, 1}
        with torch.inference_mode():
            output = model(torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids]))
        expected.append(float(output.logits.sigmoid()))
    with open_llm(folder) as llm:
        found = [each.score for each in llm.score(query, documents, use_tqdm=False)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_a_generator_embeds_when_asked(tiny_model: Callable[[str], Path]):
    """And its head, which embeddings have no use for, is not kept."""
    import transformers

    folder = tiny_model("qwen3")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(torch.tensor([prompts()[2]])).last_hidden_state[0]
    with open_llm(folder, task="embed") as llm:
        assert llm.config.model.architecture == "Qwen3Model"
        [found] = llm.embed(prompts()[2], use_tqdm=False)
        assert_close(found.embedding, pooled(hidden, "last"))
        with pytest.raises(TaskError, match=r"cannot generate text: it is loaded to embed texts"):
            llm.generate([[5, 6]], use_tqdm=False)
    with open_llm(folder) as llm, pytest.raises(TaskError, match=r"cannot embed texts: .* generate text"):
        llm.embed("a text", use_tqdm=False)


def test_sentence_transformers_files_make_an_embedder_of_a_generator(tmp_path: Path):
    folder = tiny_models.make_tiny_model("qwen2", tmp_path)
    write_pooling(folder, "lasttoken")
    with open_llm(folder) as llm:
        assert llm.config.model.pooler is not None and llm.config.model.pooler.kind == "last"
    with open_llm(folder, task="generate") as llm:
        assert llm.config.model.pooler is None


@pytest.fixture(scope="module")
def matryoshka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("matryoshka")
    folder = make_tiny_pooler(
        "BertModel", directory, pooling="mean_tokens", normalize=False, matryoshka_dimensions=[16, 32]
    )
    with open_llm(folder) as llm:
        yield llm


def test_dimensions_and_normalisation_are_the_callers(matryoshka: LLM):
    [whole] = matryoshka.embed([prompts()[1]], use_tqdm=False)
    assert abs(np.linalg.norm(whole.embedding) - 1) > 1e-3
    [unit] = matryoshka.embed([prompts()[1]], normalize=True, use_tqdm=False)
    assert_close(unit.embedding, whole.embedding / np.linalg.norm(whole.embedding))
    [short] = matryoshka.embed([prompts()[1]], normalize=True, dimensions=16, use_tqdm=False)
    assert_close(short.embedding, whole.embedding[:16] / np.linalg.norm(whole.embedding[:16]))


@pytest.mark.parametrize("dimensions", [8, 65])
def test_dimensions_that_the_model_lacks_are_refused(matryoshka: LLM, dimensions: int):
    with pytest.raises(ParameterError, match=rf"dimensions is {dimensions}, but the model has 16, 32"):
        matryoshka.embed("a", dimensions=dimensions)


def test_bad_requests_are_refused_by_name(folder_of: Callable[[str], Path]):
    with pytest.raises(ParameterError, match="dimensions must be from 1"):
        PoolingParams(dimensions=0)
    with open_llm(folder_of("BertModel")) as llm:
        with pytest.raises(PromptTooLongError, match=f"has {MAX_LEN + 1} tokens, .* is {MAX_LEN} tokens"):
            llm.embed([[5] * (MAX_LEN + 1)])
        with pytest.raises(ParameterError, match=r"is_matryoshka"):
            llm.embed("a", dimensions=16)
        with pytest.raises(ParameterError, match=r"prompt_name 'query' is unknown; the model has none"):
            llm.embed("a", prompt_name="query")
        with pytest.raises(TaskError, match="cannot classify texts: it is loaded to embed texts"):
            llm.classify("a")
        with pytest.raises(ValueError, match="2 queries and 3 documents"):
            llm.score(["a", "b"], ["c", "d", "e"])
        assert len(llm.embed([[5] * MAX_LEN], use_tqdm=False)) == 1  # and none of them stands in its way


def test_settings_that_do_not_fit_are_refused(folder_of: Callable[[str], Path]):
    with pytest.raises(ConfigError, match=r"task is generate, but BertModel is made to embed"):
        open_llm(folder_of("BertModel"), task="generate")
    with pytest.raises(
        ConfigError, match=r"max_num_batched_tokens is 64, .* max_model_len 80 tokens in one step"
    ):
        open_llm(folder_of("BertModel"), max_num_batched_tokens=64, max_num_seqs=4, max_model_len=80)
    with open_llm(folder_of("BertModel"), max_num_batched_tokens=64, max_num_seqs=4) as llm:
        assert llm.config.model.max_model_len == 64  # lowered, with a warning


def test_scores_of_an_embedder_are_cosines(folder_of: Callable[[str], Path]):
    with open_llm(folder_of("ModernBertModel")) as llm:
        first, second, third = (
            output.embedding for output in llm.embed(["one", "two", "three"], use_tqdm=False)
        )
        found = llm.score("one", ["two", "three"], use_tqdm=False)
    expected = [float(first @ second), float(first @ third)]
    np.testing.assert_allclose([each.score for each in found], expected, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", ["BertModel", "ModernBertForSequenceClassification", "Qwen3Model"])
def test_two_ranks_together_equal_one_alone(architecture: str, folder_of: Callable[[str], Path]):
    pooler = PoolerConfig(kind="mean", tasks=("classify",), labels=("a", "b", "c", "d"))

    def work(comm: Communicator | None) -> list[torch.Tensor]:
        return PromptRun(load_tiny(folder_of(architecture), comm=comm, pooler=pooler)).logits(prompts())

    alone = work(None)
    for rank in run_ranks(2, work):
        for found, expected in zip(rank, alone, strict=True):
            assert_close(found.numpy(), expected.numpy())
