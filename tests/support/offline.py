"""Short ways to ask an `LLM` for one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inferplane import LLM, RequestOutput, SamplingParams


def open_llm(folder: Path, **args: Any) -> LLM:
    usual = {
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "kv_cache_bytes": 64 << 20,
        "max_model_len": 512,
    }
    return LLM(str(folder), **{**usual, **args})


def greedy(num_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **more})


def run(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output


def run_together(llm: LLM, *requests: tuple[Any, SamplingParams]) -> list[RequestOutput]:
    return llm.generate(
        [prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )


def tokens(output: RequestOutput) -> list[int]:
    [completion] = output.outputs
    assert completion.error is None
    return completion.token_ids


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
