"""Tables against transformers', through the layer that models use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferplane.layers import RotaryEmbedding
from inferplane.models.rope_config import rope_config
from model_harness import make_context

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "factor": 2.0,
        "short_factor": [1.0 + 0.1 * index for index in range(8)],
        "long_factor": [2.0 + 0.3 * index for index in range(8)],
        "original_max_position_embeddings": 32,
    },
}


def _expected(config: dict[str, Any], num_positions: int) -> torch.Tensor:
    """``[num_positions, rotary_dim]`` for a context of just that length."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in config.items() if k != "architectures"}))
    cos, sin = rope(torch.zeros(1), torch.arange(num_positions).unsqueeze(0))
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


def _layer(config: dict[str, Any], max_model_len: int, **head: int) -> RotaryEmbedding:
    return RotaryEmbedding(make_context(config, max_model_len=max_model_len), rope_config(config, **head))


@pytest.mark.parametrize("max_model_len", [16, 32, 33, 64, 100, 200])
@pytest.mark.parametrize("rope_type", TYPES)
def test_table_equals_transformers_before_and_after_the_trained_length(rope_type: str, max_model_len: int):
    config = {**SHAPE, "rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **TYPES[rope_type]}}
    table = _layer(config, max_model_len).table()
    assert table.dtype == torch.float32
    assert table.shape == (max_model_len, 16)
    torch.testing.assert_close(table, _expected(config, max_model_len), rtol=0, atol=2e-5)


def test_table_is_made_once(monkeypatch: pytest.MonkeyPatch):
    layer = _layer(SHAPE, 32)
    first = layer.table()
    assert layer.table() is first


def test_only_the_leading_part_of_a_head_is_rotated():
    config = {**SHAPE, "partial_rotary_factor": 0.5}
    layer = _layer(config, 32)
    q, k = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    positions = torch.tensor([0, 7, 31])
    rotated_q, rotated_k = layer(q.clone(), k.clone(), positions)
    assert torch.equal(rotated_q[..., 8:], q[..., 8:])
    assert torch.equal(rotated_k[..., 8:], k[..., 8:])
    assert torch.equal(rotated_q[0], q[0])
    # a rotation keeps the length of each pair
    pairs = rotated_q[..., :4].square() + rotated_q[..., 4:8].square()
    torch.testing.assert_close(pairs, q[..., :4].square() + q[..., 4:8].square())


def test_products_depend_on_distance_alone():
    layer = _layer(SHAPE, 64)
    q, k = torch.randn(1, 1, 16).expand(64, 1, 16), torch.randn(1, 1, 16).expand(64, 1, 16)
    rotated_q, rotated_k = layer(q.clone(), k.clone(), torch.arange(64))
    products = rotated_q[:, 0] @ rotated_k[:, 0].T
    for distance in (0, 1, 13):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
