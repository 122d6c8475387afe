"""What DeepSeek's attention really keeps, with the sizes of V3: one vector a token, whoever serves the layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inferplane.api import DeviceDescriptor
from inferplane.api.attention import AttentionQuery
from inferplane.api.kv import MLAAttentionSpec
from inferplane.models.registry import build_model
from inferplane.plugins import load_plugins
from model_harness import BLOCK_SIZE, make_context, read_config
from tiny_models import make_tiny_model

NUM_HEADS, KV_RANK, NOPE, ROPE, VALUE = 128, 512, 128, 64, 128


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_takes_less_than_a_twentieth_of_its_keys_and_values(dtype: str, tmp_path: Path) -> None:
    folder = make_tiny_model(
        "deepseek_v3",
        tmp_path,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        kv_lora_rank=KV_RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
    )
    layers = build_model(make_context(read_config(folder), dtype=dtype)).attention_layers()
    torch_dtype, device = getattr(torch, dtype), DeviceDescriptor("cpu", 0, "", 0)
    served_by = set()
    for layer in layers:
        assert isinstance(layer.spec, MLAAttentionSpec)
        assert layer.spec.block_bytes == BLOCK_SIZE * (KV_RANK + ROPE) * torch_dtype.itemsize
        query = AttentionQuery(layer=layer, dtype=torch_dtype, kv_dtype=torch_dtype, device=device)
        for backend in load_plugins(quiet=True).attention_backends(device):
            if backend.unsupported_reason(query) is None:
                kv = backend.allocate_kv(layer, 7, torch_dtype, torch.device("cpu"))
                whole = 7 * BLOCK_SIZE * NUM_HEADS * (NOPE + ROPE + VALUE) * torch_dtype.itemsize
                assert kv.nbytes == 7 * layer.spec.block_bytes <= whole / 20
                served_by.add(backend.name)
    assert served_by >= {"reference", "cpu_paged"}
