"""Where requests with a state start from: after 1,000 shared tokens no more than one block of it is computed again."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_models
from inferplane.layers.state_mixer import CHECKPOINT_TOKENS
from offline import assert_idle, greedy, open_llm
from teacher import Teacher

NUM_TOKENS = 8


@pytest.mark.parametrize("family", ["granite_hybrid", "qwen3_next"])
def test_a_shared_prefix_is_computed_once(family: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(family)
    teacher, rng = Teacher(folder), random.Random(3)
    shared = [rng.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(1000)]
    inputs = [{"prompt_token_ids": [*shared, *rng.sample(range(3, 900), 5)]} for _ in range(3)]
    with open_llm(folder, max_model_len=1024, max_num_batched_tokens=300) as llm:
        first, *later = (
            llm.generate([each], greedy(NUM_TOKENS, logprobs=0), use_tqdm=False)[0] for each in inputs
        )
        assert_idle(llm)
    teacher.assert_greedy([first, *later], NUM_TOKENS)
    assert first.num_cached_tokens == 0
    for output in later:
        assert len(shared) - CHECKPOINT_TOKENS < output.num_cached_tokens <= len(shared)
