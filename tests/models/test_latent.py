"""What DeepSeek's attention really keeps, with the sizes of V3, and prompts whose heads make their own of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from inferplane.api import DeviceDescriptor, latents
from inferplane.api.attention import AttentionInputs, AttentionQuery
from inferplane.api.kv import MLAAttentionSpec
from inferplane.layers import latent_attention
from inferplane.models.registry import build_model
from inferplane.plugins import load_plugins
from model_harness import BLOCK_SIZE, make_context, read_config
from offline import assert_idle, greedy, open_llm
from teacher import Teacher
from tiny_models import VOCAB_SIZE, make_tiny_model

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


WAYS: dict[str, dict[str, Any]] = {
    "native": {"attention_backend": "cpu_native"},
    "paged": {"attention_backend": "cpu_paged"},
    "reference": {"device": "reference"},
    "whole prompts": {"max_num_batched_tokens": 256},
}


@pytest.mark.parametrize("way", WAYS)
def test_expanded_prompts_give_the_tokens_of_transformers(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks beside decoding requests, in a pool that is too small for all and behind cached prefixes; every prompt
    that saves products is expanded, a few heads at a time."""
    folder = make_tiny_model("deepseek_v3", tmp_path)
    monkeypatch.setattr(latents, "LEAST_EXPANDED_TOKENS", 2)
    monkeypatch.setattr(latent_attention, "EXPANDED_BYTES", 2 * 40 * (40 + 20) * 4)
    seen: list[tuple[int, bool]] = []
    cut = latents.StepCut.__call__

    def spy(self: latents.StepCut, inputs: AttentionInputs) -> Any:
        before, prompts = cut(self, inputs)
        if prompts is not None:
            seen.append((before.num_reqs, prompts.query_lens != prompts.key_lens))
        return before, prompts

    monkeypatch.setattr(latents.StepCut, "__call__", spy)
    teacher, rng = Teacher(folder), random.Random(1)
    inputs = [
        {"prompt_token_ids": [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]}
        for length in (30, 27, 31, 70)
    ]
    layers = build_model(make_context(read_config(folder))).attention_layers()
    block_bytes = layers[0].spec.block_bytes // BLOCK_SIZE * 16
    shape = {"max_model_len": 96, "max_num_seqs": 4, "block_size": 16, "max_num_batched_tokens": 32}
    args = {**shape, "kv_cache_bytes": 7 * block_bytes * len(layers), **WAYS[way]}
    with open_llm(folder, **args) as llm:
        for prompts in (inputs, inputs[-1:]):
            teacher.assert_greedy(llm.generate(prompts, greedy(24, logprobs=0), use_tqdm=False), 24)
        stats = llm.stats()
        assert stats.num_preemptions > 0 and stats.num_prefix_hit_tokens > 0
        assert_idle(llm)
    assert any(num_before for num_before, _ in seen), "no step had decoding requests and a prompt"
    assert any(has_context for _, has_context in seen) == (way != "whole prompts")
