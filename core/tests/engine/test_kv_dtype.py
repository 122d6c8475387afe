"""``kv_cache_dtype`` through the engine: capacity, sharing, preemption, and what it costs in perplexity."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferplane import LLM, SamplingParams
from inferplane.api.kv import QUANTIZED_KV
from inferplane.config import ConfigError
from repository import ROOT

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def open_llm(folder: Path, **settings: Any) -> LLM:
    usual = {"device": "reference", "dtype": "float32", "kv_cache_bytes": 1 << 20, "max_num_seqs": 8}
    return LLM(str(folder), **{**usual, **settings})


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_the_same_memory_holds_more_blocks(tiny_model: Callable[[str], Path]) -> None:
    num_blocks = {}
    for kv_dtype in ("auto", *QUANTIZED_KV):
        with open_llm(tiny_model("llama"), dtype="bfloat16", kv_cache_dtype=kv_dtype) as llm:
            num_blocks[kv_dtype] = llm.stats().num_blocks
    # two layers of two KV heads of 16: a token is 256 bytes in bfloat16
    assert num_blocks["auto"] == (1 << 20) // (256 * 16)
    assert num_blocks["fp8_e4m3"] == num_blocks["fp8_e5m2"] == 2 * num_blocks["auto"]
    assert num_blocks["int8_per_token_head"] == (1 << 20) // (2 * 2 * 2 * (16 + 4) * 16)
    with open_llm(tiny_model("llama"), kv_cache_dtype="float16") as llm:  # of float32
        assert llm.stats().num_blocks == num_blocks["auto"]


def test_float16_is_next_to_nothing_off(tiny_model: Callable[[str], Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for kv_dtype in ("auto", "float16"):
        with open_llm(tiny_model("llama"), kv_cache_dtype=kv_dtype) as llm:
            [output] = llm.generate([{"prompt_token_ids": list(range(3, 60))}], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        found.append([entry.chosen.logprob for entry in output.prompt_logprobs if entry is not None])
    assert found[0] != found[1]
    assert found[0] == pytest.approx(found[1], abs=5e-3)


@pytest.mark.parametrize("kv_dtype", QUANTIZED_KV)
def test_preemption_and_shared_prefixes_change_no_token(
    tiny_model: Callable[[str], Path], kv_dtype: str
) -> None:
    prompts = [[*range(3, 40), 100 + index] for index in range(6)]
    folder = tiny_model("llama")
    with open_llm(folder, kv_cache_dtype=kv_dtype, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = answers(llm, prompts)
    tight = 12 * 2 * 2 * 2 * 16 * (20 if kv_dtype.startswith("int8") else 16)
    with open_llm(folder, kv_cache_dtype=kv_dtype, kv_cache_bytes=tight, max_model_len=64) as llm:
        assert answers(llm, prompts) == alone
        stats = llm.stats()
        assert (stats.num_blocks, stats.num_preemptions > 0) == (12, True)
        assert stats.num_prefix_hit_tokens > 0


def test_missing_scales_are_told_once(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "inferplane"),
        open_llm(tiny_model("llama"), kv_cache_dtype="fp8_e4m3"),
    ):
        pass
    told = [record.getMessage() for record in caplog.records if "has no scales" in record.getMessage()]
    [found] = told
    assert found.endswith("for model.layers.0.self_attn and 1 more: stored as fp8_e4m3 they are divided by 1")
    assert any("KV blocks of fp8_e4m3" in record.getMessage() for record in caplog.records)


def test_a_type_that_is_none(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype must be one of auto, float16, fp8_e4m3, .*, got 'fp8'"
    ):
        open_llm(tiny_model("llama"), kv_cache_dtype="fp8")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_perplexity(dtype: str, smollm2_folder: Path) -> None:
    """fp8 (e4m3) is within half a percent of a plain cache and int8 within a fifth, as far as eight pieces of a book
    tell: e4m3 costs about that (docs/quantization.md), so that three standard errors of the differences of tokens are
    left to chance."""
    text = (ROOT / "benchmarks" / "carroll_1865.txt").read_text(encoding="utf-8")
    found = {}
    for kv_dtype in ("auto", "fp8_e4m3", "int8_per_token_head"):
        settings = {"dtype": dtype, "kv_cache_bytes": 256 << 20, "max_model_len": 513}
        with open_llm(smollm2_folder, kv_cache_dtype=kv_dtype, **settings) as llm:
            ids = llm.get_tokenizer().encode(text)
            prompts = [{"prompt_token_ids": ids[start : start + 512]} for start in range(0, 36_000, 4500)]
            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
            outputs = llm.generate(prompts, params, use_tqdm=False)
        entries = [entry for output in outputs for entry in output.prompt_logprobs or ()]
        found[kv_dtype] = np.array([entry.chosen.logprob for entry in entries if entry is not None])
    for kv_dtype, most, most_error in (("fp8_e4m3", 0.005, 0.003), ("int8_per_token_head", 0.002, 0.0015)):
        above = found["auto"] - found[kv_dtype]
        error = above.std() / math.sqrt(len(above))
        assert error < most_error, (kv_dtype, error)
        assert abs(math.expm1(above.mean())) < most + 3 * error, (kv_dtype, above.mean(), error)
