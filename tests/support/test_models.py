"""The models that other tests use as oracles hold what they promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny_models


def test_the_folder_keeps_the_numbers_of_the_gguf_in_float32(smollm2_folder: Path, smollm2_gguf: Path):
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    stored = load_file(smollm2_folder / "model.safetensors")
    packed = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}
    down = packed["blk.3.ffn_down.weight"]
    expected = gguf.quants.dequantize(down.data, down.tensor_type)
    np.testing.assert_array_equal(stored["model.layers.3.mlp.down_proj.weight"], expected)
    assert {value.dtype for value in stored.values()} == {np.dtype("float32")}


def test_the_folder_splits_digits_and_ends_at_the_end_of_a_turn(smollm2_folder: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    assert [tokenizer.decode([token]) for token in tokenizer("12345").input_ids] == list("12345")
    assert json.loads((smollm2_folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_a_tiny_model_loads_and_its_greedy_tokens_are_no_ties(arch: str, tiny_model):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_model(arch)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Licensed under the Apache License – 日本語 🙂 42"
    tokens = tokenizer(text).input_ids
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < len(text.encode())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second).min() > 1e-3
    assert best.std() > 0


def test_the_same_arguments_write_the_same_weights_and_overrides_reach_the_configuration(tmp_path: Path):
    first = tiny_models.make_tiny_model("llama", tmp_path / "a", tie_word_embeddings=True)
    second = tiny_models.make_tiny_model("llama", tmp_path / "b", tie_word_embeddings=True)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert json.loads((first / "config.json").read_text())["tie_word_embeddings"] is True


def test_an_unknown_architecture_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="'gpt9'"):
        tiny_models.make_tiny_model("gpt9", tmp_path)
