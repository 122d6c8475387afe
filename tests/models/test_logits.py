"""Every family of models against transformers in float32, without an engine: prefill, chunks, single steps, ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import tiny_models
from families import FAMILIES
from inferplane.api.comm import Communicator
from model_harness import PromptRun, load_tiny, run_ranks

RELATIVE_TOLERANCE = 1e-4
"""Of the largest logit."""
LENGTHS = (1, 17, 40, 90)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def expected_logits(folder: Path, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return [model.eval()(torch.tensor([prompt])).logits[0] for prompt in prompts]


def assert_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= RELATIVE_TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tiny_model: Callable[[str], Path]):
    folder = tiny_model(family)
    run, expected = PromptRun(load_tiny(folder)), expected_logits(folder, prompts())
    for chunk in (None, 7, 1):
        assert_close(run.logits(prompts(), chunk), expected)
    assert_close(run.logits(prompts(), asks_for_last=True), [each[-1:] for each in expected])


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_together_equal_one_alone(family: str, tiny_model: Callable[[str], Path]):
    folder = tiny_model(family)
    alone = PromptRun(load_tiny(folder)).logits(prompts())

    def work(comm: Communicator) -> list[torch.Tensor]:
        return PromptRun(load_tiny(folder, comm=comm)).logits(prompts(), chunk=32)

    for rank in run_ranks(2, work):
        assert_close(rank, alone)
