"""A state-space model through the engine: greedy tokens and log-probabilities equal transformers' in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import tiny_models
from inferplane.layers import ssm
from offline import assert_idle, greedy, open_llm
from teacher import Teacher

PROMPTS = [[(7 * i + 3 * length) % 900 + 3 for i in range(length)] for length in (1, 5, 17, 40, 90)]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=tiny_models.VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16,
        n_groups=2, state_size=16, expand=2, time_step_limit=(0.0, 4.0), initializer_range=0.5,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("mamba2")
    Mamba2ForCausalLM(config).save_pretrained(path)
    tiny_models.write_tokenizer(path)
    return path


def test_chunks_preemption_and_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssm, "CHECKPOINT_TOKENS", 16)
    teacher = Teacher(folder)
    state_bytes = 2 * (224 * 3 * 4 + 8 * 16 * 16 * 4)
    with open_llm(
        folder,
        kv_cache_bytes=8 * state_bytes,
        max_model_len=144,
        max_num_batched_tokens=32,
        max_num_seqs=8,
    ) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        params = greedy(NUM_TOKENS, logprobs=0)
        teacher.assert_greedy(llm.generate(inputs, params, use_tqdm=False), NUM_TOKENS)
        assert llm.stats().num_preemptions > 0
        for _ in range(2):
            [warm] = llm.generate(inputs[-1:], params, use_tqdm=False)
            teacher.assert_greedy([warm], NUM_TOKENS)
        assert warm.num_cached_tokens == 80  # of 90: the last checkpoint
        assert_idle(llm)
