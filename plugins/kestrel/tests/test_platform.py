"""A card answers as the reference platform does, alone and as a pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inferplane import LLM, SamplingParams
from inferplane.config import ConfigError
from inferplane.plugins import load_plugins

PROMPTS = ["Permission is hereby granted", "The work of the licensor", "You may"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=8),
    SamplingParams(temperature=1.0, top_k=5, seed=1, repetition_penalty=1.3, bad_words=["the"], max_tokens=8),
]


def answers(folder: Path, device: str, **settings: object) -> list[list[int]]:
    with LLM(str(folder), device=device, dtype="float32", **settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert all(output.outputs[0].error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("num_cards", [1, 2])
def test_a_card_answers_as_the_reference_does(tiny_model: Callable[[str], Path], num_cards: int):
    folder = tiny_model("llama")
    found = answers(folder, "kestrel", tensor_parallel_size=num_cards, async_scheduling=True)
    assert found == answers(folder, "reference")


def test_every_rank_needs_a_card(tiny_model: Callable[[str], Path]):
    with pytest.raises(ConfigError, match="from kestrel:1 on, and this process sees 1"):
        LLM(str(tiny_model("llama")), device="kestrel:1", tensor_parallel_size=2)


def test_cards_have_to_be_asked_for(monkeypatch: pytest.MonkeyPatch):
    plugins = load_plugins()
    assert plugins.select_device(None).platform != "kestrel"
    assert plugins.select_device("kestrel:1").index == 1
    monkeypatch.setenv("KESTREL_NUM_CARDS", "0")
    plugins = load_plugins()
    plugins.probe()
    [record] = [record for record in plugins.records if record.name == "kestrel"]
    assert record.reason is not None
    assert "KESTREL_NUM_CARDS is 0" in record.reason
