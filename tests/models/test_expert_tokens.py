"""How many tokens each expert got is what transformers' routers say of the same sequences."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_models
from offline import greedy, open_llm

NUM_TOKENS = 6


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "more", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 2}], ids=["one", "chunks"]
)
def test_every_token_is_counted_once(
    family: str, more: dict[str, Any], tiny_model: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    folder, rng = tiny_model(family), random.Random(4)
    inputs = [
        {"prompt_token_ids": rng.sample(range(3, tiny_models.VOCAB_SIZE), length)} for length in (3, 20, 33)
    ]
    with open_llm(folder, count_expert_tokens=True, enable_prefix_caching=False, **more) as llm:
        assert not any(sum(counts) for counts in llm.stats().expert_tokens.values())
        outputs = llm.generate(inputs, greedy(NUM_TOKENS), use_tqdm=False)
        found = llm.stats().expert_tokens
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = None
    for output in outputs:
        # the last token is not run
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
        with torch.inference_mode():
            logits = torch.stack(model(torch.tensor([tokens]), output_router_logits=True).router_logits)
        chosen = logits.topk(model.config.num_experts_per_tok).indices
        counts = torch.nn.functional.one_hot(chosen, logits.shape[-1]).sum((1, 2))
        expected = counts if expected is None else expected + counts
    assert list(found) == [f"model.layers.{index}.{_router_of(family)}" for index in range(2)]
    assert list(found.values()) == expected.tolist()


def _router_of(family: str) -> str:
    return "block_sparse_moe.gate" if family == "mixtral" else "mlp.gate"


def test_nothing_is_counted_unless_asked_for_or_without_experts(tiny_model: Callable[[str], Path]) -> None:
    for family, is_asked in (("mixtral", False), ("llama", True)):
        with open_llm(tiny_model(family), count_expert_tokens=is_asked) as llm:
            llm.generate([{"prompt_token_ids": [3, 4, 5]}], greedy(2), use_tqdm=False)
            assert llm.stats().expert_tokens == {}
            assert llm.config.graphs.is_enabled == (not is_asked)
