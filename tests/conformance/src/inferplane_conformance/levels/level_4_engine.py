"""Level 4: the engine on the device answers as transformers does, however the scheduler cuts the work."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inferplane import LLM, RequestOutput, SamplingParams
from inferplane.request import ParameterError
from inferplane_conformance.prompts import prompt
from inferplane_conformance.subject import Subject
from inferplane_conformance.transformers_oracle import complete

LENGTHS = (1, 2, 17, 40, 100)
NUM_TOKENS = 12
LOGPROB_TOLERANCE = 1e-3
"""In float32, where sums in another order are all that may differ."""
HALF_LOGPROB_TOLERANCE = 0.5
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
FEW = {"allowed_token_ids": list(range(40, 60))}
"""So few tokens that an answer repeats some of them."""
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 1.2, "top_k": 5},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.5},
    "presence_penalty": {"temperature": 0.0, "presence_penalty": 2.0, **FEW},
    "frequency_penalty": {"temperature": 0.0, "frequency_penalty": 2.0, **FEW},
    "logit_bias": {"temperature": 0.0, "logit_bias": {50: 8.0, 60: -100.0}},
    "allowed_token_ids": {"temperature": 0.9, "allowed_token_ids": [40, 41, 42, 43]},
    "bad_words": {"temperature": 0.0, "bad_words": list(string.printable)},
    "stop_token_ids": {"temperature": 0.0, "stop_token_ids": list(range(3, 100))},
    "min_tokens": {"temperature": 1.0, "min_tokens": 4, "ignore_eos": False},
}
"""Every setting that changes which token is chosen: none may be without effect on some device, unless it is refused."""


@contextmanager
def engine(subject: Subject, folder: Path, **settings: Any) -> Iterator[LLM]:
    settings = {"dtype": "float32", "max_model_len": 256, **settings}
    with LLM(str(folder), device=subject.name, **settings) as llm:
        yield llm


@pytest.fixture
def folder(subject: Subject, llama_folder: Path) -> Path:
    import torch

    if fault := subject.dtype_fault(torch.float32):
        pytest.skip(f"the platform refuses float32: {fault}")
    return llama_folder


def generate(llm: LLM, prompts: Sequence[Sequence[int]], **params: Any) -> list[RequestOutput]:
    params = {**GREEDY, **params}
    outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].error is None, output.outputs[0].error
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def expected_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [complete(folder, ids, NUM_TOKENS).token_ids for ids in prompts]


def differences(output: RequestOutput, folder: Path) -> float:
    """The largest between log-probabilities of the output and the oracle's, prompt and completion."""
    wanted = complete(folder, output.prompt_token_ids, NUM_TOKENS)
    found = [entry.chosen.logprob for entry in output.outputs[0].logprobs or []]
    found_prompt = [entry.chosen.logprob for entry in (output.prompt_logprobs or [])[1:] if entry is not None]
    assert len(found) == NUM_TOKENS
    assert len(found_prompt) == len(output.prompt_token_ids) - 1
    pairs = [*zip(found, wanted.logprobs), *zip(found_prompt, wanted.prompt_logprobs)]
    return max(abs(a - b) for a, b in pairs)


def test_greedy_tokens_and_logprobs(subject: Subject, folder: Path) -> None:
    prompts = [prompt(length) for length in LENGTHS]
    with engine(subject, folder) as llm:
        together = generate(llm, prompts, logprobs=1, prompt_logprobs=1)
        alone = [generate(llm, [ids])[0] for ids in prompts]
    assert tokens(together) == expected_tokens(folder, prompts)
    assert tokens(alone) == tokens(together), "a request's answer depends on its neighbours"
    assert max(differences(output, folder) for output in together) < LOGPROB_TOLERANCE


def test_the_platforms_own_type(subject: Subject, folder: Path) -> None:
    """Whatever type `config_defaults` chooses for a half-precision checkpoint, the first token's distribution is the
    model's."""
    dtype = subject.defaults("bfloat16")["dtype"]
    prompts = [prompt(length) for length in LENGTHS[1:]]
    with engine(subject, folder, dtype=dtype) as llm:
        outputs = generate(llm, prompts, max_tokens=1, logprobs=1, prompt_logprobs=1)
    for output in outputs:
        wanted = complete(folder, output.prompt_token_ids, NUM_TOKENS)
        found = [entry.chosen.logprob for entry in (output.prompt_logprobs or [])[1:] if entry is not None]
        mean = sum(abs(a - b) for a, b in zip(found, wanted.prompt_logprobs)) / len(found)
        assert mean < HALF_LOGPROB_TOLERANCE, f"log-probabilities in {dtype} differ by {mean:.2f} on average"


def test_prefix_cache(subject: Subject, folder: Path) -> None:
    """Cold, warm, and warm in part."""
    shared = prompt(100)
    prompts = [shared, shared[:70] + prompt(20, seed=1), shared]
    with engine(subject, folder) as llm:
        outputs = [generate(llm, [ids])[0] for ids in prompts]
    assert tokens(outputs) == expected_tokens(folder, prompts)
    cold, partly, warm = (output.num_cached_tokens for output in outputs)
    assert cold == 0
    assert 0 < partly <= 70
    assert partly <= warm < 100


def test_without_a_prefix_cache(subject: Subject, folder: Path) -> None:
    ids = prompt(100)
    with engine(subject, folder, enable_prefix_caching=False) as llm:
        outputs = [generate(llm, [ids])[0] for _ in range(2)]
    assert tokens(outputs) == expected_tokens(folder, [ids] * 2)
    assert outputs[1].num_cached_tokens == 0


def test_chunked_prompts(subject: Subject, folder: Path) -> None:
    """A budget of a few tokens a step, so that every prompt is cut and mixed with decoding."""
    prompts = [prompt(length) for length in (100, 1, 61, 33)]
    with engine(subject, folder, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        outputs = generate(llm, prompts, logprobs=1, prompt_logprobs=1)
    assert tokens(outputs) == expected_tokens(folder, prompts)
    assert max(differences(output, folder) for output in outputs) < LOGPROB_TOLERANCE


def test_preemption(subject: Subject, folder: Path) -> None:
    """A pool that holds two sequences, and six that grow."""
    prompts = [prompt(length, seed=5) for length in (30, 31, 29, 30, 28, 30)]
    block_size = int(subject.defaults("float32")["block_size"])
    block_bytes = 2 * 2 * block_size * 2 * 16 * 4  # layers, keys and values, tokens, heads, head_dim, float32
    kv_cache_bytes = block_bytes * (2 * -(-128 // block_size) + 1)
    with engine(
        subject,
        folder,
        enable_prefix_caching=False,
        block_size=block_size,
        kv_cache_bytes=kv_cache_bytes,
        max_model_len=128,
        max_num_seqs=6,
    ) as llm:
        outputs = generate(llm, prompts, max_tokens=60)
        num_preemptions = llm.stats().num_preemptions
    assert num_preemptions > 0, "the pool was not short, so nothing was tried"
    assert [each[:NUM_TOKENS] for each in tokens(outputs)] == expected_tokens(folder, prompts)
    assert tokens(outputs) == [complete(folder, ids, 60).token_ids for ids in prompts]


def test_sampling_settings(subject: Subject, folder: Path) -> None:
    """Each setting has the effect that it has on the reference platform, or is refused by its name."""
    ids = prompt(40)
    refused = subject.platform.unsupported_sampling()
    settings = {name: {"seed": 11, **params} for name, params in SAMPLING.items()}
    answers = {}
    for device in (subject.name, "reference"):
        with LLM(str(folder), device=device, dtype="float32", max_model_len=256) as llm:
            if device == subject.name:
                for name in settings.keys() & refused.keys():
                    with pytest.raises(ParameterError, match=name):
                        generate(llm, [ids], **settings[name])
            answers[device] = {
                name: tokens(generate(llm, [ids], **params))[0]
                for name, params in settings.items()
                if name not in refused
            }
            plain = [tokens(generate(llm, [ids], **params))[0] for params in ({}, FEW)]
    assert answers[subject.name] == answers["reference"]
    without_effect = [name for name, found in answers["reference"].items() if found in plain]
    assert not without_effect, f"the test itself shows nothing for {without_effect}"


def test_many_requests_at_once(subject: Subject, folder: Path) -> None:
    """Three times as many as a step takes, of all lengths."""
    prompts = [prompt(3 + 7 * (index % 9), seed=index) for index in range(24)]
    with engine(subject, folder, max_num_seqs=8) as llm:
        outputs = generate(llm, prompts)
        stats = llm.stats()
    assert tokens(outputs) == expected_tokens(folder, prompts)
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks, "blocks are held although no request is left"


def test_tensor_parallel(subject: Subject, folder: Path) -> None:
    if fault := subject.pair_fault:
        pytest.skip(fault)
    prompts = [prompt(length) for length in LENGTHS]
    with engine(subject, folder, tensor_parallel_size=2) as llm:
        outputs = generate(llm, prompts, logprobs=1, prompt_logprobs=1)
    assert tokens(outputs) == expected_tokens(folder, prompts)
    assert max(differences(output, folder) for output in outputs) < LOGPROB_TOLERANCE
