"""A folder with nothing but a configuration runs on drawn weights, with token ids for text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from inferplane import LLM, SamplingParams
from inferplane.models.errors import ModelLoadError
from inferplane.request import ParameterError

PROMPTS = [{"prompt_token_ids": [5, 9, 2, 70]}, {"prompt_token_ids": [7]}]
SETTINGS = dict(device="reference", dtype="float32", kv_cache_bytes=8 << 20, max_num_seqs=4)


@pytest.fixture
def config_only(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    shutil.copy(tiny_model("llama") / "config.json", tmp_path)
    return tmp_path


def tokens(llm: LLM, **params: object) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=6, **params), use_tqdm=False)
    assert all(output.outputs[0].text == "" for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def test_a_config_alone_is_enough(config_only: Path):
    with LLM(str(config_only), load_format="dummy", **SETTINGS) as llm:
        first = tokens(llm, ignore_eos=True)
        assert [len(ids) for ids in first] == [6, 6]
        with pytest.raises(ParameterError, match="without a tokenizer: give prompts as token ids"):
            llm.generate("text", use_tqdm=False)
    with LLM(str(config_only), load_format="dummy", **SETTINGS) as llm:
        assert tokens(llm, ignore_eos=True) == first
    with LLM(str(config_only), load_format="dummy", seed=1, **SETTINGS) as llm:
        assert tokens(llm, ignore_eos=True) != first


def test_the_end_of_sequence_is_known_without_a_tokenizer(config_only: Path):
    config = config_only / "config.json"
    with LLM(str(config_only), load_format="dummy", **SETTINGS) as llm:
        second = tokens(llm, ignore_eos=True)[0][1]

    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": [second]}))
    with LLM(str(config_only), load_format="dummy", **SETTINGS) as llm:
        ids = tokens(llm)[0]
        assert ids[-1] == second and len(ids) <= 2


def test_a_tokenizer_may_be_skipped(tiny_model: Callable[[str], Path]):
    with LLM(str(tiny_model("llama")), skip_tokenizer_init=True, **SETTINGS) as llm:
        assert [len(ids) for ids in tokens(llm, ignore_eos=True)] == [6, 6]


def test_weights_are_still_needed_when_nobody_asked_for_dummies(config_only: Path):
    with pytest.raises(ModelLoadError, match=r"has no model\.safetensors"):
        LLM(str(config_only), **SETTINGS)


def test_another_format_than_the_model_has_is_refused(tiny_model: Callable[[str], Path]):
    with pytest.raises(ModelLoadError, match="is a safetensors model, but load_format is gguf"):
        LLM(str(tiny_model("llama")), load_format="gguf", **SETTINGS)


def test_a_config_may_claim_more_positions_than_any_memory_holds(config_only: Path):
    config = config_only / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 10**12}))
    with LLM(str(config_only), load_format="dummy", **SETTINGS) as llm:
        assert llm.config.model.max_model_len == llm.stats().num_blocks * 16
        assert [len(ids) for ids in tokens(llm, ignore_eos=True)] == [6, 6]
