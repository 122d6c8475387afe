"""Every family of models through the engine: greedy tokens and log-probabilities equal transformers' in float32.

The quick run completes six prompts of ragged lengths with 24 tokens in a pool that is too small for all of them, in
chunks of 32 tokens, and once more with the prefixes cached. The slow ones do each of these apart, with 64 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from families import FAMILIES
from inferplane import LLM, RequestOutput
from inferplane.engine.kv_grouping import group_layers
from inferplane.engine.kv_sizing import bytes_per_request
from inferplane.layers import state_mixer
from inferplane.models.registry import build_model
from model_harness import make_context, read_config
from offline import assert_idle, greedy, open_llm
from teacher import Teacher

pytestmark = pytest.mark.usefixtures("no_step_raises")

LENGTHS = (1, 5, 17, 40, 60, 90)
QUICK_TOKENS, ALL_TOKENS = 24, 64
MAX_LEN, MAX_STEP_TOKENS = 144, 32


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def tight_pool(folder: Path, max_model_len: int) -> dict[str, int]:
    """Settings of an engine whose pool holds one sequence of the longest length and no second one."""
    layers = build_model(make_context(read_config(folder), max_model_len=max_model_len)).kv_layers()
    specs = {layer.name: replace(layer.spec, block_size=16) for layer in layers}
    groups = group_layers(specs, max_model_len, MAX_STEP_TOKENS)
    return {
        "kv_cache_bytes": bytes_per_request(groups, max_model_len, MAX_STEP_TOKENS),
        "max_model_len": max_model_len,
        "max_num_batched_tokens": MAX_STEP_TOKENS,
        "max_num_seqs": 8,
        "block_size": 16,
    }


def keeps_states(folder: Path) -> bool:
    return bool(build_model(make_context(read_config(folder))).state_layers())


def complete(llm: LLM, num_tokens: int) -> list[RequestOutput]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts()]
    return llm.generate(inputs, greedy(num_tokens, logprobs=0), use_tqdm=False)


@pytest.fixture(autouse=True)
def frequent_checkpoints(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of states, so that requests as short as here pass some; where ranks are processes, those would not know."""
    if "two ranks" not in request.node.name:
        monkeypatch.setattr(state_mixer, "CHECKPOINT_TOKENS", 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(family: str, tiny_model: Callable[[str], Path]):
    folder = tiny_model(family)
    teacher = Teacher(folder)
    with open_llm(folder, **tight_pool(folder, MAX_LEN)) as llm:
        teacher.assert_greedy(complete(llm, QUICK_TOKENS), QUICK_TOKENS)
        # short chunks give back so much that all find room in turn
        assert llm.stats().num_preemptions > 0 or family == "llama4"
        [warm] = llm.generate(
            [{"prompt_token_ids": prompts()[-1]}], greedy(QUICK_TOKENS, logprobs=0), use_tqdm=False
        )
        teacher.assert_greedy([warm], QUICK_TOKENS)
        assert_idle(llm)


MODES: dict[str, dict[str, Any]] = {
    "usual": {},
    "chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 8},
    "reference": {"device": "reference"},
    "two ranks": {"tensor_parallel_size": 2, "executor": "multiprocess"},
    "tight pool": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_mode_cold_and_warm(family: str, mode: str, tiny_model: Callable[[str], Path]):
    folder = tiny_model(family)
    teacher = Teacher(folder)
    args = tight_pool(folder, LENGTHS[-1] + ALL_TOKENS + 16) if mode == "tight pool" else MODES[mode]
    with open_llm(folder, **args) as llm:
        for _ in range(2):
            teacher.assert_greedy(complete(llm, ALL_TOKENS), ALL_TOKENS)
        if mode == "tight pool":
            assert llm.stats().num_preemptions > 0 or family == "llama4"
        elif mode != "two ranks" or not keeps_states(folder):  # checkpoints are further apart there
            assert llm.stats().num_prefix_hit_tokens > 0
        assert_idle(llm)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_prompts_around_the_window_in_chunks_shorter_than_it(family: str, tmp_path: Path):
    """A chunk that is longer than the window, or as long, must not see what lies behind it, nor ahead."""
    folder = tiny_models.make_tiny_model(family, tmp_path, sliding_window=8)
    teacher, rng = Teacher(folder), random.Random(2)
    inputs = [
        {"prompt_token_ids": [rng.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)]}
        for length in (7, 8, 9, 20)
    ]
    for step_tokens in (5, 64):
        with open_llm(folder, max_num_batched_tokens=step_tokens, max_num_seqs=4) as llm:
            teacher.assert_greedy(llm.generate(inputs, greedy(20, logprobs=0), use_tqdm=False), 20)
