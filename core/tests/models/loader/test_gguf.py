"""A GGUF file gives the tensors and the configuration of the checkpoint that it was made from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import gguf_files
import tiny_models
from inferplane.models.errors import ModelLoadError
from inferplane.models.loader.gguf import GGUFFile
from inferplane.models.registry import build_model
from inferplane.quantization.gguf import GgufFormat
from model_harness import PromptRun, load_tiny, make_context

ARCH_OF = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


@pytest.fixture(scope="module", params=ARCH_OF)
def pair(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path_factory
) -> tuple[Path, Path]:
    """A folder and the unpacked GGUF file of the same weights."""
    folder = tiny_model(request.param)
    path = tmp_path_factory.mktemp("pair") / f"{request.param}.gguf"
    return folder, gguf_files.folder_to_gguf(folder, path, ARCH_OF[request.param])


def dequantized(checkpoint: GGUFFile) -> Iterator[tuple[str, torch.Tensor]]:
    packed = checkpoint.hf_config.get("quantization_config", {"tensor_types": {}})
    read = GgufFormat(packed)
    for name, tensor in checkpoint.tensors():
        matrix = read.matrix(name.removesuffix(".weight"), len(tensor), _num_columns(checkpoint, name))
        yield name, tensor if matrix is None else matrix.read({"weight": tensor}).dequantize(torch.float32)


def _num_columns(checkpoint: GGUFFile, name: str) -> int:
    config = checkpoint.hf_config
    heads = config["num_attention_heads"] * config["head_dim"]
    return {"o_proj": heads, "down_proj": config["intermediate_size"]}.get(
        name.split(".")[-2], config["hidden_size"]
    )


def test_tensors_are_those_of_the_folder(pair: tuple[Path, Path]) -> None:
    folder, path = pair
    expected = load_file(folder / "model.safetensors")
    checkpoint = GGUFFile(path)
    got = dict(checkpoint.tensors())
    assert sorted(got) == sorted(expected) == sorted(checkpoint.tensor_names())
    for name, values in expected.items():
        assert got[name].dtype == torch.float32
        assert torch.equal(got[name], values), name


def test_the_configuration_is_that_of_the_folder(pair: tuple[Path, Path]) -> None:
    folder, path = pair
    expected = json.loads((folder / "config.json").read_text())
    got = GGUFFile(path).hf_config
    # a GGUF file neither has these nor needs them
    left_out = {
        "attention_dropout",
        "initializer_range",
        "use_cache",
        "transformers_version",
        "pretraining_tp",
    }
    left_out |= {"layer_types", "max_window_layers", "pad_token_id", "bos_token_id", "head_dim"}
    for key in expected.keys() - left_out:
        assert got[key] == expected[key], key
    head_dim = expected.get("head_dim") or expected["hidden_size"] // expected["num_attention_heads"]
    assert got["head_dim"] == head_dim


def test_gemma3_answers_as_its_folder_does(tmp_path: Path) -> None:
    """Norm weights come without the 1 that files add, and the settings that files leave out are those of the family."""
    layer_types = [*["sliding_attention"] * 5, "full_attention"]
    folder = tiny_models.make_tiny_model(
        "gemma3",
        tmp_path,
        num_hidden_layers=6,
        layer_types=layer_types,
        query_pre_attn_scalar=32,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    )
    checkpoint = GGUFFile(gguf_files.folder_to_gguf(folder, tmp_path / "g.gguf", "gemma3"))
    expected = load_file(folder / "model.safetensors")
    got = dict(checkpoint.tensors())
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(got[name], values, rtol=0, atol=2e-7)
    model = build_model(make_context(checkpoint.hf_config))
    model.load_weights(got.items())
    prompts = [[5, 9, 2, 700, 31] * 12]
    [ours], [theirs] = PromptRun(model).logits(prompts), PromptRun(load_tiny(folder)).logits(prompts)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4", "F16", "BF16"])
def test_packed_tensors_are_what_ggml_makes_of_them(tmp_path: Path, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    folder = tiny_models.make_tiny_model("llama", tmp_path)
    path = gguf_files.folder_to_gguf(folder, tmp_path / "packed.gguf", "llama", kind)
    config = json.loads((folder / "config.json").read_text())
    for hf_name, values in dequantized(GGUFFile(path)):
        weights = load_file(folder / "model.safetensors")[hf_name].numpy()
        if weights.ndim == 2:
            # rows are quantized one by one, so their order does not matter to the numbers
            weights = gguf.dequantize(gguf.quantize(weights, kind), kind)
        np.testing.assert_array_equal(values.float().numpy(), weights, err_msg=hf_name)
    assert GGUFFile(path).hf_config.get("dtype") == {"F16": "float16", "BF16": "bfloat16"}.get(name)
    assert config["num_hidden_layers"] == 2


def test_biases_of_q_and_k_are_put_back_in_order(tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_model("llama", tmp_path, attention_bias=True)
    checkpoint = GGUFFile(gguf_files.folder_to_gguf(folder, tmp_path / "bias.gguf", "llama"))
    expected = load_file(folder / "model.safetensors")
    for name, values in checkpoint.tensors():
        assert torch.equal(values, expected[name]), name
    assert checkpoint.hf_config["attention_bias"] is True


def test_tied_embeddings_have_no_head(tmp_path: Path) -> None:
    folder = tiny_models.make_tiny_model("qwen3", tmp_path, tie_word_embeddings=True)
    checkpoint = GGUFFile(gguf_files.folder_to_gguf(folder, tmp_path / "tied.gguf", "qwen3"))
    assert checkpoint.hf_config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in checkpoint.tensor_names()


def test_the_demo_model_equals_what_transformers_makes_of_it(
    smollm2_gguf: Path, smollm2_folder: Path
) -> None:
    checkpoint = GGUFFile(smollm2_gguf)
    expected = load_file(smollm2_folder / "model.safetensors")
    names = set()
    for name, values in dequantized(checkpoint):
        names.add(name)
        assert torch.equal(values, expected[name]), name
    assert names == expected.keys()
    config = json.loads((smollm2_folder / "config.json").read_text())
    for key in ("hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings", "rope_parameters"):
        assert checkpoint.hf_config[key] == config[key]
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_opening_imports_no_torch(smollm2_gguf: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from inferplane.models.loader.gguf import GGUFFile;"
        f"c = GGUFFile(Path({str(smollm2_gguf)!r})); c.hf_config, c.generation_config, c.chat_template;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- configuration ---------------------------------------------------------------------------------------------------


def write_variant(
    tmp_path: Path,
    folder: Path,
    changes: dict[str, Any],
    more: dict[str, np.ndarray] | None = None,
    without: str | None = None,
) -> Path:
    """The tiny llama with other metadata; a value of None leaves the key out."""
    config = json.loads((folder / "config.json").read_text())
    metadata = {**gguf_files.config_metadata(config, "llama"), **changes}
    tensors = {
        gguf_files.gguf_name(k, "llama"): v.numpy()
        for k, v in load_file(folder / "model.safetensors").items()
    }
    tensors = {name: values for name, values in tensors.items() if name != without}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return gguf_files.write_gguf(tmp_path / "variant.gguf", metadata, {**tensors, **(more or {})})


def test_llama3_scaling_is_recovered_from_the_frequency_factors(tmp_path: Path, tiny_model) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from inferplane.models.rope_config import inverse_frequencies, rope_config

    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 131072}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(**sizes, rope_parameters=dict(llama3)), device="cpu"
    )
    plain = 1.0 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    factors = (plain / scaled.double().numpy()).astype(np.float32)
    more = {"llama.rope.freq_base": 500000.0, "llama.context_length": 131072}
    path = write_variant(tmp_path, tiny_model("llama"), more, {"rope_freqs.weight": factors})
    config = GGUFFile(path).hf_config
    assert config["rope_parameters"] == llama3

    # factors of no known origin divide the frequencies as they are
    odd = np.linspace(1, 3, 8, dtype=np.float32)
    config = GGUFFile(
        write_variant(tmp_path, tiny_model("llama"), more, {"rope_freqs.weight": odd})
    ).hf_config
    for seq_len in (None, 10**6):
        frequencies, factor = inverse_frequencies(rope_config(config), seq_len)
        np.testing.assert_allclose(frequencies, plain / odd)
        assert factor == 1.0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scaling.type": "none"}, {"rope_type": "default"}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 256,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 16.0,
            },
        ),
        ({"llama.rope.dimension_count": 8}, {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ],
)
def test_rope_scaling_of_the_metadata(tmp_path: Path, tiny_model, changes, expected) -> None:
    config = GGUFFile(write_variant(tmp_path, tiny_model("llama"), changes)).hf_config
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **expected}


def test_end_tokens_and_sampling_defaults(tmp_path: Path, tiny_model) -> None:
    changes = {
        "tokenizer.ggml.bos_token_id": 5,
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 8,
        "tokenizer.ggml.eom_token_id": 7,
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
    }
    got = GGUFFile(write_variant(tmp_path, tiny_model("llama"), changes)).generation_config
    assert got == {"bos_token_id": 5, "eos_token_id": [7, 8], "temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("changes", "without", "message"),
    [
        ({"general.architecture": "falcon"}, None, "architecture 'falcon'.*llama, mistral, qwen2, qwen3"),
        ({"llama.expert_count": 8}, None, "expert_count is 8; mixtures of experts"),
        ({"split.count": 3}, None, "one of 3 files"),
        ({"llama.embedding_length": None}, None, "'llama.embedding_length' is missing"),
        ({"llama.embedding_length": "64"}, None, "embedding_length should be of type int, but is '64'"),
        ({"llama.attention.head_count": 0}, None, "head_count is 0, which no model can have"),
        (
            {"llama.block_count": 3},
            None,
            "block_count is 3, but the file has tensors of 2 layers; missing: 2",
        ),
        ({"llama.block_count": 2**31 - 1}, None, "block_count is 2147483647, but the file has tensors of 2"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, None, "layer_norm_rms_epsilon should be"),
        ({"llama.rope.scaling.type": "spiral"}, None, "rope scaling type 'spiral' is unknown"),
        (
            {"llama.rope.scaling.type": "linear"},
            None,
            "rope.scaling.factor should be at least 1, but is None",
        ),
        ({}, "token_embd.weight", "no tensor 'token_embd.weight'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, tiny_model, changes, without, message: str
) -> None:
    path = write_variant(tmp_path, tiny_model("llama"), changes, without=without)
    with pytest.raises(ModelLoadError, match=message):
        _ = GGUFFile(path).hf_config


def test_a_tensor_that_the_model_does_not_have_is_refused_by_name(tmp_path: Path, tiny_model) -> None:
    more = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    with pytest.raises(ModelLoadError, match=r"'blk\.0\.attn_sinks\.weight' is none that a llama model has"):
        GGUFFile(write_variant(tmp_path, tiny_model("llama"), {}, more))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_of_the_header_never_crash(
    tiny_model, tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    path = tmp_path / "variant.gguf"
    if not path.exists():
        write_variant(tmp_path, tiny_model("llama"), {})
    whole = path.read_bytes()
    content = bytearray(whole)
    for place, value in changes:
        content[place] = value
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(content)
    try:
        checkpoint = GGUFFile(changed)
        _ = checkpoint.hf_config, checkpoint.generation_config
        for _name, _values in checkpoint.tensors():
            pass
    except ModelLoadError:
        pass
