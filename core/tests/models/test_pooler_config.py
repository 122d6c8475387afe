"""What is read of a model's pooling, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferplane.config import ConfigError, PoolerConfig
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_config import usual_form
from inferplane.models.pooler_config import read_pooler, sentence_length
from inferplane.models.task import choose_task, task_of
from tiny_poolers import write_pooling

HF = {"hidden_size": 64}


def read(path: Path, task: str = "embed", *, is_encoder: bool = True, **hf: Any) -> PoolerConfig:
    return read_pooler(path, {**HF, **hf}, task, is_encoder=is_encoder)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertModel", "embed"),
        ("ModernBertForMaskedLM", "embed"),
        ("GPT2LMHeadModel", "generate"),
        ("LlamaForCausalLM", "generate"),
        ("NewForSequenceClassification", "classify"),
        ("Fake", "generate"),
    ],
)
def test_the_name_of_an_architecture_tells_its_task(architecture: str, task: str):
    assert task_of(architecture) == task


def test_a_task_is_chosen(tmp_path: Path):
    known = ("LlamaForCausalLM", "LlamaModel", "FalconForCausalLM")
    assert choose_task("auto", tmp_path, "LlamaForCausalLM", known) == ("generate", "LlamaForCausalLM")
    assert choose_task("embed", tmp_path, "LlamaForCausalLM", known) == ("embed", "LlamaModel")
    with pytest.raises(ConfigError, match="task is embed, but FalconForCausalLM is made to generate"):
        choose_task("embed", tmp_path, "FalconForCausalLM", known)
    write_pooling(tmp_path, "lasttoken")
    assert choose_task("auto", tmp_path, "LlamaForCausalLM", known) == ("embed", "LlamaModel")
    assert choose_task("generate", tmp_path, "LlamaForCausalLM", known) == ("generate", "LlamaForCausalLM")


@pytest.mark.parametrize(
    ("mode", "kind"), [("mean_tokens", "mean"), ("cls_token", "cls"), ("lasttoken", "last")]
)
def test_sentence_transformers_says_how(tmp_path: Path, mode: str, kind: str):
    write_pooling(tmp_path, mode, normalize=kind == "cls")
    found = read(tmp_path)
    assert (found.kind, found.normalize, found.max_dimensions) == (kind, kind == "cls", 64)
    assert found.source == "modules.json"


def test_the_newer_spelling_is_read(tmp_path: Path):
    write_pooling(tmp_path, "mean_tokens")
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    assert read(tmp_path).kind == "last"


def test_without_files_the_default_is_said(tmp_path: Path):
    found = read(tmp_path), read(tmp_path, is_encoder=False)
    assert [each.kind for each in found] == ["mean", "last"]
    assert all(each.normalize and each.source.startswith("default") for each in found)
    assert sentence_length(tmp_path) is None


def test_prompts_and_length(tmp_path: Path):
    settings = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    assert (read(tmp_path).prompts, read(tmp_path).default_prompt) == (settings["prompts"], "find: ")
    assert sentence_length(tmp_path) == 77


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "1_Pooling/config.json",
            {"pooling_mode_max_tokens": True},
            "pools by max_tokens; known, one at a time",
        ),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True},
            "cls_token and",
        ),
        ("1_Pooling/config.json", {}, "pools by nothing"),
        (
            "modules.json",
            [{"type": "x.Pooling", "path": "1_Pooling"}, {"type": "x.Dense", "path": "2"}],
            "Dense",
        ),
        ("modules.json", {"idx": 0}, "should be a list of modules"),
        ("config_sentence_transformers.json", {"prompts": {"query": 5}}, "map names to texts"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, file: str, content: Any, message: str):
    write_pooling(tmp_path, "mean_tokens")
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("hf", "labels", "activation"),
    [
        ({}, 2, "softmax"),
        ({"num_labels": 1}, 1, "sigmoid"),
        ({"id2label": {"1": "b", "0": "a", "2": "c"}}, 3, "softmax"),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, 4, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, 1, "none"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            1,
            "none",
        ),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.Sigmoid"}, 1, "sigmoid"),
    ],
)
def test_classes(tmp_path: Path, hf: dict[str, Any], labels: int, activation: str):
    found = read(tmp_path, "classify", **hf)
    assert (len(found.labels), found.activation, found.kind) == (labels, activation, "cls")
    assert found.tasks == (("classify", "score") if labels == 1 else ("classify",))
    if "id2label" in hf:
        assert found.labels == ("a", "b", "c")


def test_dimensions(tmp_path: Path):
    assert read(tmp_path).dimensions == ()
    assert read(tmp_path, is_matryoshka=True).dimensions is None
    assert read(tmp_path, matryoshka_dimensions=[8, 16]).dimensions == (8, 16)


def test_positions_that_begin_behind_the_padding_token():
    found = usual_form({"model_type": "xlm-roberta", "pad_token_id": 1, "max_position_embeddings": 514})
    assert (found["position_offset"], found["max_position_embeddings"]) == (2, 512)
    assert usual_form(found) == found
