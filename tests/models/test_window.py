"""Windows shorter than a prompt, than a chunk and than the answer, in layers that take turns with full ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from offline import assert_idle, greedy, open_llm
from teacher import Teacher
from tiny_models import make_tiny_model

WINDOW, NUM_TOKENS = 8, 20
PROMPTS = [[(5 * i + length) % 900 + 3 for i in range(length)] for length in (7, 8, 9, 20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("gemma2", tmp_path_factory.mktemp("window"), sliding_window=WINDOW)


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("max_step_tokens", [3, 64])
def test_each_token_is_that_of_an_explicit_mask(folder: Path, max_step_tokens: int, device: str) -> None:
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    limits = {"max_num_batched_tokens": max_step_tokens, "max_num_seqs": min(max_step_tokens, 4)}
    with open_llm(folder, device=device, block_size=4, **limits) as llm:
        teacher = Teacher(folder)
        for _ in range(2):  # cold, then with what is left of the prefixes
            outputs = llm.generate(inputs, greedy(NUM_TOKENS, logprobs=0), use_tqdm=False)
            teacher.assert_greedy(outputs, NUM_TOKENS)
        assert llm.stats().num_prefix_hit_tokens > 0
        assert_idle(llm)
