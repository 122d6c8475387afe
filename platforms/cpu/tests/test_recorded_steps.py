"""Whole models whose decode steps are recorded: bit for bit what they give unrecorded, whatever comes in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferplane import LLM, RequestOutput, SamplingParams
from inferplane_kernels_cpu import native

pytestmark = [
    pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason())),
    pytest.mark.usefixtures("no_step_raises"),
]

MOST_REQUESTS = 6


def play(
    folder: Path, dtype: str, seed: int, *, enable_graphs: bool
) -> tuple[list[RequestOutput], list[int]]:
    """Requests that come, go on by turns and are given up at random, in a pool that is too small for all of them.
    Returns what each got, and the batch sizes that were recorded."""
    rng = random.Random(seed)
    with LLM(
        str(folder),
        device="cpu",
        dtype=dtype,
        max_num_seqs=MOST_REQUESTS,
        max_model_len=128,
        block_size=16,
        kv_cache_bytes=_POOL_BYTES[dtype],
        enable_graphs=enable_graphs,
    ) as llm:
        streams: dict[int, Iterator[RequestOutput]] = {}
        last: dict[int, RequestOutput] = {}
        for turn in range(120):
            choice = rng.random()
            if choice < 0.15 and len(streams) < MOST_REQUESTS + 2:
                prompt = [rng.randrange(3, 900) for _ in range(rng.choice([1, 5, 30, 70]))]
                params = SamplingParams(
                    temperature=rng.choice([0.0, 0.8]), seed=turn, max_tokens=rng.randint(2, 40), ignore_eos=True,
                    logprobs=2,
                )  # fmt: skip
                streams[turn] = llm.stream({"prompt_token_ids": prompt}, params)
            elif choice < 0.18 and streams:
                streams.pop(rng.choice(sorted(streams))).close()
            elif streams:
                advance(streams, last, rng.choice(sorted(streams)))
        while streams:
            advance(streams, last, min(streams))
        graphs = llm._client.core._executor.worker.runner._graphs
        return list(last.values()), [] if graphs is None else graphs.sizes


def advance(streams: dict[int, Iterator[RequestOutput]], last: dict[int, RequestOutput], turn: int) -> None:
    output = next(streams[turn], None)
    if output is None:
        del streams[turn]
    else:
        last[turn] = output


_POOL_BYTES = {"bfloat16": 1 << 17, "float32": 1 << 18}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_random_schedules_give_the_same_recorded_or_not(
    tiny_model: Callable[[str], Path], family: str, dtype: str
) -> None:
    for seed in range(3):
        recorded, sizes = play(tiny_model(family), dtype, seed, enable_graphs=True)
        plain, none = play(tiny_model(family), dtype, seed, enable_graphs=False)
        assert len(sizes) > 2 and not none
        assert len(recorded) > 5
        for ours, theirs in zip(recorded, plain, strict=True):
            assert ours.outputs == theirs.outputs
