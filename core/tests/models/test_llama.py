"""The Llama family against transformers in float32."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from inferplane.api.attention import AttentionLayer
from inferplane.api.comm import Communicator
from inferplane.api.kv import FullAttentionSpec
from inferplane.config import ConfigError
from inferplane.models.errors import ModelLoadError
from inferplane.models.llama import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from inferplane.models.registry import build_model
from model_harness import PromptRun, load_tiny, make_context, read_config, run_ranks

TOLERANCE = 1e-4

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-eps": ("llama", {"rms_norm_eps": 1e-2}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}},
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama3-rope": ("llama3_rope", {}),
    "mistral": ("mistral", {}),
    "mistral-within-window": ("mistral", {"sliding_window": 256}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe-not-renormalized": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    "qwen3-moe-dense-layer": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "mixtral": ("mixtral", {}),
    "qwen3-bias-mha": ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
}


def _prompts(lengths: Sequence[int], vocab_size: int = tiny_models.VOCAB_SIZE) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _expected(folder: Path, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def _assert_close(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float = TOLERANCE
):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max().item() <= tolerance
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path):
    arch, overrides = VARIANTS[variant]
    folder = tiny_models.make_tiny_model(arch, tmp_path, **overrides)
    prompts = _prompts([1, 5, 17, 64, 200])
    expected = _expected(folder, prompts)
    run = PromptRun(load_tiny(folder))
    _assert_close(run.logits(prompts), expected)
    _assert_close(run.logits(prompts, chunk=7), expected)


@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
def test_greedy_tokens_equal_those_of_transformers(arch: str, tiny_model: Callable[[str], Path]):
    folder = tiny_model(arch)
    [prompt] = _prompts([9])
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = model.generate(torch.tensor([prompt]), do_sample=False, min_new_tokens=32, max_new_tokens=32)[
        0
    ].tolist()
    rows = PromptRun(load_tiny(folder)).logits([tokens], chunk=1)[0]
    # min_new_tokens forbids the end of the text, token 2
    choices = rows[len(prompt) - 1 : -1].index_fill(-1, torch.tensor(2), -torch.inf).argmax(-1)
    assert choices.tolist() == tokens[len(prompt) :]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype: str, tiny_model: Callable[[str], Path]):
    folder = tiny_model("qwen3")
    prompts = _prompts([12, 40])
    run = PromptRun(load_tiny(folder, dtype=dtype))
    for ours, theirs in zip(run.logits(prompts), _expected(folder, prompts)):
        assert ours.dtype == getattr(torch, dtype)
        assert torch.nn.functional.cosine_similarity(ours.float(), theirs, dim=-1).min() > 0.98


# 1024 tokens split unevenly over 3 ranks, 1001 over 2, and of 4 tokens the third rank has none.
PARALLEL: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama-2": ("llama", 2, {}),
    "llama-biases-2": ("llama", 2, {"attention_bias": True, "mlp_bias": True}),
    "llama-kv-replicated-2": ("llama", 2, {"num_key_value_heads": 1}),
    "llama-tied-4": ("llama", 4, {"tie_word_embeddings": True}),
    "llama-3": (
        "llama",
        3,
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 162},
    ),
    "qwen2-kv-replicated-3": (
        "qwen2",
        3,
        {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96, "intermediate_size": 162},
    ),
    "mixtral-2": ("mixtral", 2, {}),
    "qwen3-moe-4": ("qwen3_moe", 4, {}),
    "qwen3-tied-2": ("qwen3", 2, {"tie_word_embeddings": True, "vocab_size": 1001}),
    "qwen3-kv-replicated-4": ("qwen3", 4, {}),
    "mistral-tiny-vocab-3": (
        "mistral",
        3,
        {"num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 162, "vocab_size": 4},
    ),
}


@pytest.mark.parametrize("case", PARALLEL)
def test_ranks_together_equal_one_alone(case: str, tmp_path: Path):
    arch, world_size, overrides = PARALLEL[case]
    folder = tiny_models.make_tiny_model(arch, tmp_path, **overrides)
    vocab_size = read_config(folder)["vocab_size"]
    prompts = [[token % vocab_size for token in prompt] for prompt in _prompts([3, 21, 50])]
    alone = PromptRun(load_tiny(folder)).logits(prompts)

    def work(comm: Communicator) -> list[torch.Tensor]:
        return PromptRun(load_tiny(folder, comm=comm)).logits(prompts, chunk=16)

    ranks = run_ranks(world_size, work)
    for rank in ranks:
        _assert_close(rank, alone)
        assert all(torch.equal(ours, first) for ours, first in zip(rank, ranks[0])), (
            "ranks must agree bit for bit"
        )


BAD_SPLITS: list[tuple[int, dict[str, Any], str]] = [
    (3, {}, "model.layers.0.self_attn: number of attention heads 4 cannot be split over 3 ranks"),
    (2, {"num_attention_heads": 6, "num_key_value_heads": 3}, "number of KV heads 3"),
    (
        4,
        {"num_attention_heads": 12, "num_key_value_heads": 3},
        "KV heads 3 is neither a multiple nor a divisor of 4",
    ),
    (2, {"intermediate_size": 161}, "model.layers.0.mlp.gate_proj: out_features 161"),
]


@pytest.mark.parametrize(("world_size", "overrides", "message"), BAD_SPLITS)
def test_a_split_that_is_impossible_names_layer_and_numbers(
    world_size: int, overrides: dict[str, Any], message: str, tiny_model: Callable[[str], Path]
):
    hf_config = {**read_config(tiny_model("llama")), "head_dim": 16, **overrides}
    with pytest.raises(ConfigError, match=message) as caught:
        run_ranks(world_size, lambda comm: build_model(make_context(hf_config, comm=comm)))
    assert caught.value.option == "tensor_parallel_size"


BAD_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "gelu_fast"}, "hidden_act 'gelu_fast'"),
    ("llama", {"hidden_size": None}, "hidden_size should be a whole number of at least 1"),
    ("llama", {"num_hidden_layers": "2"}, "num_hidden_layers .* is '2'"),
    ("llama", {"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
    ("llama", {"quantization_config": {"quant_method": "spqr"}}, "quant_method 'spqr'"),
    ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps should be a positive number .* is 'small'"),
    ("llama", {"attention_bias": 1}, "attention_bias should be true or false .* is 1"),
    ("mistral", {"sliding_window": "wide"}, "sliding_window .* is 'wide'"),
    (
        "qwen3",
        {"use_sliding_window": True, "layer_types": ["sliding_attention"]},
        "layer_types should be a list of 2 types",
    ),
    (
        "qwen3",
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "mamba"]},
        r"layer_types\[1\] is 'mamba'",
    ),
]


@pytest.mark.parametrize(("arch", "changes", "message"), BAD_CONFIGS)
def test_a_config_that_cannot_run_is_refused(
    arch: str, changes: dict[str, Any], message: str, tiny_model: Callable[[str], Path]
):
    with pytest.raises(ModelLoadError, match=message):
        build_model(make_context({**read_config(tiny_model(arch)), **changes}))


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("mistral", {"sliding_window": 256}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "layer_types": None}),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 2},
        ),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_a_window_that_no_token_leaves_is_full_attention(
    arch: str, changes: dict[str, Any], tiny_model: Callable[[str], Path]
):
    model = build_model(make_context({**read_config(tiny_model(arch)), **changes}))
    assert all(type(layer.spec) is FullAttentionSpec for layer in model.attention_layers())


@pytest.mark.parametrize(
    ("arch", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 255}, [255, 255]),
        (
            "qwen2",
            {"use_sliding_window": True, "layer_types": None, "sliding_window": 9, "max_window_layers": 1},
            [None, 9],
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 8,
            },
            [8, None],
        ),
    ],
)
def test_layers_have_the_windows_that_their_config_says(
    arch: str, changes: dict[str, Any], windows: list[int | None], tiny_model: Callable[[str], Path]
):
    model = build_model(make_context({**read_config(tiny_model(arch)), **changes}))
    specs = [layer.spec for layer in model.attention_layers()]
    assert [getattr(spec, "window", None) for spec in specs] == windows


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("LlamaConfig", LlamaForCausalLM),
        ("MistralConfig", MistralForCausalLM),
        ("Qwen2Config", Qwen2ForCausalLM),
        ("Qwen3Config", Qwen3ForCausalLM),
    ],
)
def test_missing_keys_mean_what_they_mean_to_transformers(name: str, model: type[LlamaForCausalLM]):
    import transformers

    required = {
        "vocab_size": 100,
        "hidden_size": 2048,
        "intermediate_size": 64,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
    }
    theirs = getattr(transformers, name)(**required)
    ours = model.read_shape(required)
    assert ours.heads.num_kv_heads == theirs.num_key_value_heads
    assert ours.heads.head_dim == getattr(theirs, "head_dim", 2048 // 32)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.has_tied_embeddings == theirs.tie_word_embeddings
    assert model.read_shape({**required, "num_key_value_heads": None}).heads.num_kv_heads == 32


def test_attention_layers_are_described_for_this_rank(tiny_model: Callable[[str], Path]):
    hf_config = read_config(tiny_model("qwen3"))

    def work(comm: Communicator) -> list[AttentionLayer]:
        return build_model(make_context(hf_config, dtype="bfloat16", comm=comm)).attention_layers()

    for layers in run_ranks(2, work):
        assert [layer.name for layer in layers] == [f"model.layers.{index}.self_attn" for index in (0, 1)]
        for layer in layers:
            assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (2, 1, 32)
            assert layer.scale == 32**-0.5
            assert layer.spec == FullAttentionSpec(
                block_size=4, num_kv_heads=1, head_dim=32, dtype="bfloat16"
            )


def test_the_demo_model_equals_transformers(smollm2_folder: Path):
    prompts = _prompts([40, 7, 1], vocab_size=49152)
    expected = _expected(smollm2_folder, prompts)
    run = PromptRun(load_tiny(smollm2_folder))
    _assert_close(run.logits(prompts, chunk=16), expected, tolerance=2e-4)
