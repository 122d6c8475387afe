"""Every family of models through the engine: greedy tokens and log-probabilities equal transformers' in float32.

The quick run completes five prompts of ragged lengths with 24 tokens in a pool that is too small for all of them, in
chunks of 32 tokens, and once more with the prefixes cached. The slow ones do each of these apart, with 64 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from families import FAMILIES
from inferplane import LLM, RequestOutput
from inferplane.engine.kv_grouping import group_layers
from inferplane.engine.kv_sizing import bytes_per_request
from inferplane.models.registry import build_model
from model_harness import make_context, read_config
from offline import assert_idle, greedy, open_llm

LENGTHS = (1, 5, 17, 40, 90)
QUICK_TOKENS, ALL_TOKENS = 24, 64
MAX_LEN, MAX_STEP_TOKENS = 144, 32
TOLERANCE = 1e-4
"""Of a log-probability, and the least lead of a token that rounding does not decide."""


class Teacher:
    """What transformers thinks of given sequences."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self._model = loaded.eval()

    def assert_greedy(self, outputs: Sequence[RequestOutput], num_tokens: int) -> None:
        """Each token is the best one after those before it, so that all together are the greedy answer."""
        for output in outputs:
            [completion] = output.outputs
            assert completion.error is None
            assert len(completion.token_ids) == num_tokens
            logprobs = self._logprobs([*output.prompt_token_ids, *completion.token_ids])
            logprobs = logprobs[len(output.prompt_token_ids) - 1 :]
            chosen = torch.tensor(completion.token_ids)
            wanted = logprobs.gather(1, chosen.unsqueeze(1))[:, 0]
            behind = logprobs.max(-1).values - wanted
            assert behind.max() <= TOLERANCE, f"token {int(behind.argmax())} of {output.prompt_token_ids}"
            assert completion.logprobs is not None
            found = torch.tensor([entry.chosen.logprob for entry in completion.logprobs])
            assert (found - wanted).abs().max() <= TOLERANCE

    @torch.inference_mode()
    def _logprobs(self, sequence: list[int]) -> torch.Tensor:
        return self._model(torch.tensor([sequence[:-1]])).logits[0].log_softmax(-1)


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def tight_pool_bytes(folder: Path) -> int:
    """Of a pool that holds one sequence of the longest length and no second one."""
    layers = build_model(make_context(read_config(folder), max_model_len=MAX_LEN)).attention_layers()
    specs = {layer.name: replace(layer.spec, block_size=16) for layer in layers}
    groups = group_layers(specs, MAX_LEN, MAX_STEP_TOKENS)
    return bytes_per_request(groups, MAX_LEN, MAX_STEP_TOKENS)


def complete(llm: LLM, num_tokens: int) -> list[RequestOutput]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts()]
    return llm.generate(inputs, greedy(num_tokens, logprobs=0), use_tqdm=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(family: str, tiny_model: Callable[[str], Path]):
    folder = tiny_model(family)
    teacher = Teacher(folder)
    with open_llm(
        folder,
        kv_cache_bytes=tight_pool_bytes(folder),
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        max_num_seqs=8,
        block_size=16,
    ) as llm:
        teacher.assert_greedy(complete(llm, QUICK_TOKENS), QUICK_TOKENS)
        assert llm.stats().num_preemptions > 0
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
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_mode_cold_and_warm(family: str, mode: str, tiny_model: Callable[[str], Path]):
    folder = tiny_model(family)
    teacher = Teacher(folder)
    with open_llm(folder, **MODES[mode]) as llm:
        for _ in range(2):
            teacher.assert_greedy(complete(llm, ALL_TOKENS), ALL_TOKENS)
        assert llm.stats().num_prefix_hit_tokens > 0
        assert_idle(llm)
