"""The same tokens and log-probabilities as transformers in float32, however the engine is set up.

The quick runs complete 8 or 9 prompts with 20 tokens by SmolLM2, which takes every answer past the end of a block, and
with 32 by the small models; those marked slow complete 32 prompts with 64 tokens.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from inferplane import LLM, RequestOutput, SamplingParams
from oracle import Expected, Oracle
from parity import assert_parity, largest_difference, leads_at_first_difference
from parity_prompts import FEW, LONG, PROMPTS

pytestmark = pytest.mark.usefixtures("no_step_raises")

ARCHITECTURES = ("mistral", "qwen2", "qwen3", "llama3_rope")
MAX_MODEL_LEN = 1024
BLOCK_SIZE = 16
SMOLLM2_TOKENS, QUICK_TOKENS, ALL_TOKENS = 20, 32, 64
NEAR_TIE_OF_BFLOAT16 = 0.4
"""Activations in bfloat16 move a logit by up to half of this, whether the weights are packed or plain."""
NEAR_TIE_OF_FIXED_POINT = 0.02
"""Activations that are float32, and 16-bit fixed point in products."""
KV_CACHE_BYTES = 512 << 20


@dataclass(frozen=True)
class Mode:
    """A way to set the engine up."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    num_pool_tokens: int | None = None
    """For a pool that holds little more than one request."""

    def __str__(self) -> str:
        return self.name


USUAL = Mode("usual")
CHUNKS = Mode("chunks", {"max_num_batched_tokens": 32, "max_num_seqs": 16})
UNCACHED = Mode("uncached", {"enable_prefix_caching": False})
TWO_THREADS = Mode("two threads", {"num_threads": 2})
REFERENCE = Mode("reference", {"device": "reference"})
BLOCKS = [Mode(f"blocks of {size}", {"block_size": size}) for size in (32, 64)]
SPLIT = [Mode(f"{n} ranks", {"tensor_parallel_size": n, "executor": "multiprocess"}) for n in (2, 3)]


@pytest.fixture(scope="module")
def ask(smollm2_folder: Path, pytestconfig: pytest.Config) -> Callable[..., list[Expected]]:
    """`ask(prompts, num_tokens, folder)` is what transformers says; without a folder, of SmolLM2."""
    cache = pytestconfig.cache
    assert cache is not None
    cache_folder = cache.mkdir("oracle")
    oracles: dict[Path, Oracle] = {}

    def answer(prompts: Sequence[str], num_tokens: int, folder: Path = smollm2_folder) -> list[Expected]:
        if folder not in oracles:
            oracles[folder] = Oracle(folder, cache_folder)
        return oracles[folder].complete(prompts, num_tokens)

    return answer


def open_llm(model: Path, mode: Mode = USUAL, **more: Any) -> LLM:
    """Of a GGUF file the exact weights, unless ``more`` says otherwise."""
    args = {
        "quantization": "dequantize" if model.suffix == ".gguf" else None,
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_bytes": KV_CACHE_BYTES,
        **mode.args,
        **more,
    }
    return LLM(str(model), **args)


def tight_mode(folder: Path, expected: Sequence[Expected], num_tokens: int) -> tuple[Mode, int]:
    """A mode whose pool holds the longest of these requests and one block more, and the size of that pool."""
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    bytes_per_token = 2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim
    longest = max(len(each.prompt_token_ids) for each in expected) + num_tokens
    num_blocks = -(-longest // BLOCK_SIZE) + 1
    kv_cache_bytes = num_blocks * BLOCK_SIZE * bytes_per_token
    return Mode("tight", {"max_model_len": longest, "kv_cache_bytes": kv_cache_bytes}), num_blocks


def greedy(num_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **more)


def complete(llm: LLM, expected: Sequence[Expected], params: Any) -> list[RequestOutput]:
    return llm.generate([each.prompt for each in expected], params, use_tqdm=False)


def assert_mode_parity(model: Path, mode: Mode, expected: Sequence[Expected]) -> None:
    num_tokens = len(expected[0].token_ids)
    cores = os.sched_getaffinity(0)
    with open_llm(model, mode) as llm:
        assert_parity(complete(llm, expected, greedy(num_tokens, logprobs=0, prompt_logprobs=0)), expected)
        assert_parity(complete(llm, expected, greedy(num_tokens)), expected)
        assert_idle(llm)
    assert os.sched_getaffinity(0) == cores  # rank 0 of several was bound to some of them


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


def assert_parity_under_preemption(
    model: Path, folder: Path, expected: Sequence[Expected], **wanted: Any
) -> None:
    """``wanted``: further sampling parameters. Prompts that are scored run from the start again each time; others find
    part of themselves in the prefix cache."""
    num_tokens = len(expected[0].token_ids)
    mode, num_blocks = tight_mode(folder, expected, num_tokens)
    with open_llm(model, mode) as llm:
        assert llm.stats().num_blocks == num_blocks
        assert_parity(complete(llm, expected, greedy(num_tokens, logprobs=0, **wanted)), expected)
        assert llm.stats().num_preemptions > 0
        assert_idle(llm)


# SmolLM2


@pytest.mark.parametrize(
    ("prompts", "num_tokens"),
    [
        (FEW, SMOLLM2_TOKENS),
        pytest.param(PROMPTS, ALL_TOKENS, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
    ids=["quick", "all"],
)
def test_smollm2_with_packed_weights(
    prompts: Sequence[str], num_tokens: int, smollm2_gguf: Path, ask: Callable[..., list[Expected]]
) -> None:
    """Where the processor has kernels for them, at most 5 % of the answers, or one, are others than by the exact
    weights, and those part at a near tie. `FEW` asks for the capital of France."""
    leads = leads_of_packed(smollm2_gguf, ask(prompts, num_tokens), dtype="auto")
    assert len(leads) <= max(1, 0.05 * len(prompts))
    assert all(lead < NEAR_TIE_OF_FIXED_POINT for lead in leads)


def test_smollm2_with_packed_weights_in_bfloat16(
    smollm2_gguf: Path, ask: Callable[..., list[Expected]]
) -> None:
    leads = leads_of_packed(smollm2_gguf, ask(FEW, SMOLLM2_TOKENS), dtype="bfloat16")
    assert all(lead < NEAR_TIE_OF_BFLOAT16 for lead in leads)


def leads_of_packed(gguf: Path, expected: Sequence[Expected], dtype: str) -> list[float]:
    num_tokens = len(expected[0].token_ids)
    with open_llm(gguf, dtype=dtype, quantization=None) as llm:
        leads = leads_at_first_difference(complete(llm, expected, greedy(num_tokens)), expected)
    num_equal = len(expected) - len(leads)
    print(f"{num_equal} of {len(expected)} answers are equal; the others part at leads of {leads}")
    return leads


@pytest.mark.parametrize("mode", [USUAL, CHUNKS], ids=str)
def test_smollm2_from_its_gguf(mode: Mode, smollm2_gguf: Path, ask: Callable[..., list[Expected]]) -> None:
    prompts = [*FEW, LONG[:1500]] if mode is CHUNKS else FEW
    assert_mode_parity(smollm2_gguf, mode, ask(prompts, SMOLLM2_TOKENS))


def test_smollm2_from_a_folder(smollm2_folder: Path, ask: Callable[..., list[Expected]]) -> None:
    assert_mode_parity(smollm2_folder, USUAL, [each.first(16) for each in ask(FEW, SMOLLM2_TOKENS)])


def test_smollm2_on_the_reference_platform(smollm2_gguf: Path, ask: Callable[..., list[Expected]]) -> None:
    expected = [each.first(8) for each in ask(FEW[:3], SMOLLM2_TOKENS)]
    assert_mode_parity(smollm2_gguf, REFERENCE, expected)


def test_smollm2_under_preemption(
    smollm2_gguf: Path, smollm2_folder: Path, ask: Callable[..., list[Expected]]
) -> None:
    expected = ask(FEW, SMOLLM2_TOKENS)
    assert_parity_under_preemption(smollm2_gguf, smollm2_folder, expected)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "mode", [USUAL, CHUNKS, UNCACHED, TWO_THREADS, REFERENCE, *BLOCKS, SPLIT[1]], ids=str
)
@pytest.mark.parametrize("source", ["gguf", "folder"])
def test_all_of_smollm2(
    source: str, mode: Mode, smollm2_gguf: Path, smollm2_folder: Path, ask: Callable[..., list[Expected]]
) -> None:
    """Its 9 heads divide over 3 ranks, not over 2."""
    model = smollm2_gguf if source == "gguf" else smollm2_folder
    assert_mode_parity(model, mode, ask(PROMPTS, ALL_TOKENS))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scores", [{}, {"prompt_logprobs": 0}], ids=["unscored", "scored"])
def test_all_of_smollm2_under_preemption(
    scores: dict[str, int], smollm2_gguf: Path, smollm2_folder: Path, ask: Callable[..., list[Expected]]
) -> None:
    assert_parity_under_preemption(smollm2_gguf, smollm2_folder, ask(PROMPTS, ALL_TOKENS), **scores)


# Random models of other architectures


@pytest.mark.parametrize("mode", [USUAL, CHUNKS, UNCACHED, REFERENCE, *BLOCKS], ids=str)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architectures(
    arch: str, mode: Mode, tiny_model: Callable[[str], Path], ask: Callable[..., list[Expected]]
) -> None:
    folder = tiny_model(arch)
    assert_mode_parity(folder, mode, ask([*FEW, LONG[:1500]], QUICK_TOKENS, folder))


@pytest.mark.parametrize("scores", [{}, {"prompt_logprobs": 0}], ids=["unscored", "scored"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architectures_under_preemption(
    arch: str, scores: dict[str, int], tiny_model: Callable[[str], Path], ask: Callable[..., list[Expected]]
) -> None:
    folder = tiny_model(arch)
    assert_parity_under_preemption(folder, folder, ask(FEW, QUICK_TOKENS, folder), **scores)


@pytest.mark.parametrize(
    "arch",
    [
        arch if arch in ("qwen3", "llama3_rope") else pytest.param(arch, marks=pytest.mark.slow)
        for arch in ARCHITECTURES
    ],
)
def test_architectures_on_two_ranks(
    arch: str, tiny_model: Callable[[str], Path], ask: Callable[..., list[Expected]]
) -> None:
    folder = tiny_model(arch)
    assert_mode_parity(folder, SPLIT[0], ask(FEW, QUICK_TOKENS, folder))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_of_the_architectures(
    arch: str, tiny_model: Callable[[str], Path], ask: Callable[..., list[Expected]]
) -> None:
    folder = tiny_model(arch)
    prompts = [prompt[:1500] for prompt in PROMPTS]
    expected = ask(prompts, ALL_TOKENS, folder)
    for mode in (USUAL, CHUNKS):
        assert_mode_parity(folder, mode, expected)


# Prefix caching


def test_smollm2_with_a_cold_and_a_warm_cache(smollm2_gguf: Path, ask: Callable[..., list[Expected]]) -> None:
    check_cold_and_warm(smollm2_gguf, ask(FEW, SMOLLM2_TOKENS))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_of_smollm2_with_a_cold_and_a_warm_cache(
    smollm2_gguf: Path, ask: Callable[..., list[Expected]]
) -> None:
    check_cold_and_warm(smollm2_gguf, ask(PROMPTS, ALL_TOKENS))


def check_cold_and_warm(model: Path, expected: Sequence[Expected]) -> None:
    params = greedy(len(expected[0].token_ids), logprobs=0)
    with open_llm(model) as llm:
        for is_warm in (False, True):
            outputs = complete(llm, expected, params)
            assert_parity(outputs, expected)
            lengths = [len(each.prompt_token_ids) if is_warm else 0 for each in expected]
            assert [output.num_cached_tokens for output in outputs] == [whole_blocks(n) for n in lengths]
        assert llm.stats().num_prefix_hit_tokens > 0


def whole_blocks(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Tokens that a cache which holds the whole prompt spares: the last token has to run in any case."""
    return max(num_tokens - 1, 0) // block_size * block_size


@pytest.mark.parametrize(("device", "block_size"), [("cpu", 16), ("cpu", 32), ("cpu", 64), ("reference", 16)])
def test_a_prefix_hit_changes_no_answer(
    device: str, block_size: int, tiny_model: Callable[[str], Path], ask: Callable[..., list[Expected]]
) -> None:
    """Prompts that end just before, at and just after the end of a block, thrice; then with another tail."""
    folder = tiny_model("llama3_rope")
    mode = Mode("caching", {"device": device, "block_size": block_size})
    with open_llm(folder, mode) as cached, open_llm(folder, mode, enable_prefix_caching=False) as uncached:
        text_ids = cached.get_tokenizer().encode(LONG)
        params = greedy(QUICK_TOKENS, logprobs=3)
        for num_tokens in (4 * block_size - 1, 4 * block_size, 4 * block_size + 1):
            # a token of its own at the front: the lengths share no prefix
            prompt = [num_tokens, *text_ids[: num_tokens - 1]]
            tail = [*prompt[: 3 * block_size + 1], *text_ids[500:520]]
            for ids, nums_cached in (
                (prompt, [0, whole_blocks(num_tokens, block_size), whole_blocks(num_tokens, block_size)]),
                (tail, [3 * block_size]),
            ):
                [wanted] = uncached.generate([ids], params, use_tqdm=False)
                assert wanted.num_cached_tokens == 0
                for num_cached in nums_cached:
                    [output] = cached.generate([ids], params, use_tqdm=False)
                    assert output.num_cached_tokens == num_cached
                    assert_same_completion(output, wanted)


def assert_same_completion(output: RequestOutput, wanted: RequestOutput) -> None:
    [ours], [theirs] = output.outputs, wanted.outputs
    assert ours.token_ids == theirs.token_ids
    assert ours.logprobs is not None and theirs.logprobs is not None
    found = [entry.logprob for position in ours.logprobs for entry in position.top]
    assert (
        largest_difference(found, [entry.logprob for position in theirs.logprobs for entry in position.top])
        < 1e-4
    )


# Among others


def test_smollm2_among_64_mixed_requests(smollm2_gguf: Path, ask: Callable[..., list[Expected]]) -> None:
    with open_llm(smollm2_gguf) as llm:
        check_mixed_batch(llm, ask(FEW, SMOLLM2_TOKENS), num_alone=4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_of_smollm2_among_64_mixed_requests(
    smollm2_gguf: Path, ask: Callable[..., list[Expected]]
) -> None:
    with open_llm(smollm2_gguf) as llm:
        check_mixed_batch(llm, ask(PROMPTS, ALL_TOKENS), num_alone=32)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_architectures_among_64_mixed_requests(
    arch: str, tiny_model: Callable[[str], Path], ask: Callable[..., list[Expected]]
) -> None:
    folder = tiny_model(arch)
    with open_llm(folder) as llm:
        check_mixed_batch(llm, ask(FEW, QUICK_TOKENS, folder), num_alone=16)


def check_mixed_batch(llm: LLM, expected: Sequence[Expected], num_alone: int) -> None:
    """Greedy requests answer as ever, and requests with a seed as they do alone."""
    choose = random.Random(7)
    num_tokens = len(expected[0].token_ids)
    vocab_size = llm.config.model.vocab_size
    mixed = [(choose.choice(FEW), random_params(choose, vocab_size)) for _ in range(64 - len(expected))]
    batch = [*((each.prompt, greedy(num_tokens, logprobs=0)) for each in expected), *mixed]
    order = list(range(64))
    choose.shuffle(order)
    outputs = llm.generate([batch[i][0] for i in order], [batch[i][1] for i in order], use_tqdm=False)
    output_of = dict(zip(order, outputs))
    assert_parity([output_of[i] for i in range(len(expected))], expected)
    for index in range(len(expected), len(expected) + num_alone):
        prompt, params = batch[index]
        [alone] = llm.generate([prompt], params, use_tqdm=False)
        assert answers(alone) == answers(output_of[index]), (prompt, params)
    assert_idle(llm)


def random_params(choose: random.Random, vocab_size: int) -> SamplingParams:
    """Any mix of settings, always with a seed."""
    optional: dict[str, Any] = {
        "top_p": choose.uniform(0.3, 1.0),
        "top_k": choose.choice([1, 5, 50, 500]),
        "min_p": choose.uniform(0.0, 0.3),
        "presence_penalty": choose.uniform(-2, 2),
        "frequency_penalty": choose.uniform(-2, 2),
        "repetition_penalty": choose.uniform(0.5, 2),
        "logit_bias": {choose.randrange(vocab_size): choose.uniform(-100, 100) for _ in range(3)},
        "allowed_token_ids": choose.sample(range(vocab_size), 100),
        "bad_words": ["the", "a"],
        "min_tokens": 3,
        "logprobs": choose.randrange(5),
        "prompt_logprobs": choose.randrange(3),
        "stop": ["e"],
        "ignore_eos": True,
        "n": 2,
    }
    chosen = {name: value for name, value in optional.items() if choose.random() < 0.3}
    return SamplingParams(
        temperature=choose.choice([0.0, 0.5, 1.0, 1.5]),
        seed=choose.randrange(2**40),
        max_tokens=choose.randrange(4, 17),
        **chosen,
    )


def answers(output: RequestOutput) -> list[tuple[list[int], str, str | None]]:
    return [(each.token_ids, each.text, each.finish_reason) for each in output.outputs]


# Half precision

HALF_TOLERANCES = {"bfloat16": (0.7, 0.06), "float16": (0.1, 0.01)}
"""Largest and mean difference from float32 of a token's log-probability. Measured over these tokens and 96 that
follow, on a processor that multiplies in float32: 0.34 and 0.033 in bfloat16, 0.047 and 0.0042 in float16."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near(
    dtype: str, smollm2_gguf: Path, ask: Callable[..., list[Expected]]
) -> None:
    expected = ask(FEW, SMOLLM2_TOKENS)
    with open_llm(smollm2_gguf, dtype=dtype, quantization=None) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
        texts = [[*each.prompt_token_ids, *each.token_ids] for each in expected]
        outputs = llm.generate(texts, params, use_tqdm=False)
    differences = []
    for output, wanted in zip(outputs, expected):
        assert output.prompt_logprobs is not None
        found = [entry.chosen.logprob for entry in output.prompt_logprobs if entry is not None]
        both = [*wanted.prompt_logprobs, *wanted.logprobs]
        differences += [abs(a - b) for a, b in zip(found, both, strict=True)]
    largest, mean = max(differences), sum(differences) / len(differences)
    bound = HALF_TOLERANCES[dtype]
    assert largest < bound[0] and mean < bound[1], f"largest difference {largest:.3g}, mean {mean:.3g}"
