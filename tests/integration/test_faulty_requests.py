"""A request that breaks, in a plugin's code or in the model step, fails alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferplane import LLM, SamplingParams
from inferplane.request import FinishReason, ParameterError
from offline import assert_idle, greedy, open_llm, run, run_together, tokens
from toy_plugins import ToyIndex

PROMPTS = ["You", "The Licensor grants you a license", "Redistribution of the Work, in any medium"]

FAULT = 7
"""The token that breaks a step."""
FAULTY = '''
from inferplane.api import API_VERSION, PluginManifest, hookimpl

MANIFEST = PluginManifest(name="faulty", api=API_VERSION, provides=("models", "logits_processors"))

@hookimpl
def models():
    return {"FaultyForCausalLM": "toy_faulty_model:Faulty"}

@hookimpl
def logits_processors():
    return {"fails_at": "toy_faulty_module:fails_at", "only": "toy_faulty_module:only"}

def fails_at(position, prompt_token_ids, vocab_size):
    """Raises for the output token of this position; at None already while it is made."""
    if position is None:
        raise OSError("no table for this argument")
    def process(output_token_ids, logits):
        if len(output_token_ids) == position:
            raise ZeroDivisionError("a fault of this processor")
        return logits
    return process

def only(token_id, prompt_token_ids, vocab_size):
    def process(output_token_ids, logits):
        logits[:token_id] = logits[token_id + 1 :] = float("-inf")
        return logits
    return process
'''
FAULTY_MODEL = f"""
from inferplane.models.llama import LlamaForCausalLM

class Faulty(LlamaForCausalLM):
    def forward(self, batch):
        if (batch.token_ids == {FAULT}).any():
            raise RuntimeError("token {FAULT} breaks the step")
        return super().forward(batch)
"""


@pytest.fixture
def faulty(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    """The tiny model in a class whose step raises when token FAULT is in it, and processors that raise."""
    installed = tmp_path / "installed"
    installed.mkdir()
    ToyIndex(installed, monkeypatch).install("faulty", FAULTY)
    (installed / "toy_faulty_model.py").write_text(FAULTY_MODEL)
    own = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), own)
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "architectures": ["FaultyForCausalLM"]}))
    with open_llm(own) as llm:
        yield llm


def normal_requests() -> list[tuple[str, SamplingParams]]:
    never_faulty = {"max_tokens": 24, "ignore_eos": True, "logit_bias": {FAULT: -100.0}}
    drawn = [SamplingParams(temperature=0.9, seed=seed, **never_faulty) for seed in range(4)]
    return [
        *((PROMPTS[i % 3], greedy(24, logit_bias={FAULT: -100.0})) for i in range(4)),
        *((PROMPTS[1], p) for p in drawn),
    ]


@pytest.mark.parametrize(
    ("bad", "num_tokens", "message"),
    [
        (([30, FAULT, 31], greedy()), 0, "token 7 breaks the step"),
        (([30, 31], greedy(logit_bias={FAULT: 100.0})), 1, "token 7 breaks the step"),
        (
            ([30, 31], greedy(logits_processors={"fails_at": 0})),
            0,
            "ZeroDivisionError: a fault of this processor",
        ),
        (
            ([30, 31], greedy(logits_processors={"fails_at": 3})),
            3,
            "ZeroDivisionError: a fault of this processor",
        ),
        (([30, 31], greedy(logits_processors={"fails_at": None})), 0, "OSError: no table for this argument"),
        (
            ([30, 31], greedy(logits_processors={"only": 9}, logit_bias={9: -100.0})),
            0,
            "no token is left to choose",
        ),
    ],
)
def test_a_request_that_breaks_fails_alone(
    faulty: LLM, bad: tuple[list[int], SamplingParams], num_tokens: int, message: str
) -> None:
    normal = normal_requests()
    alone = [tokens(run(faulty, *request)) for request in normal]
    # 8 streams are on their way when the bad request comes, between two more that come with it
    streams = [faulty.stream(*request) for request in normal]
    begun = [next(stream) for stream in streams]
    assert not any(output.finished for output in begun)
    early, failed, late = run_together(faulty, normal[0], bad, normal[-1])
    [completion] = failed.outputs
    assert failed.finished
    assert completion.finish_reason == FinishReason.ERROR
    assert message in (completion.error or "")
    assert len(completion.token_ids) == num_tokens
    assert [tokens(early), tokens(late)] == [alone[0], alone[-1]]
    for stream, wanted in zip(streams, alone):
        *_, last = stream
        assert tokens(last) == wanted
    assert_idle(faulty)
    assert tokens(run(faulty, *normal[0])) == alone[0]


def test_a_processor_of_a_plugin_chooses(faulty: LLM) -> None:
    forced = greedy(5, logits_processors={"only": 300})
    output, neighbour = run_together(faulty, (PROMPTS[0], forced), normal_requests()[0])
    assert tokens(output) == [300] * 5
    assert tokens(neighbour) == tokens(run(faulty, *normal_requests()[0]))
    with pytest.raises(ParameterError, match=r"unknown logits processors nowhere; installed: fails_at, only"):
        run(faulty, PROMPTS[0], greedy(logits_processors={"nowhere": 1}))
