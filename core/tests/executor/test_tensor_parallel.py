"""Two ranks over real collectives give the tokens of one, and a rank that is killed is an error, not a wait."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from inferplane.api.kv import KVCacheConfig, KVCacheGroup
from inferplane.config import EngineArgs
from inferplane.config.resolve import resolve
from inferplane.executor import Executor, WorkerDiedError, make_executor
from inferplane.executor.multiprocess import MultiprocessExecutor
from inferplane.plan import NewRequest, StepPlan, StepResult
from inferplane.plugins import load_plugins
from inferplane.request import SamplingParams

BLOCK = 8
KINDS = [
    dict(temperature=0.0),
    dict(temperature=0.8, top_k=20),
    dict(temperature=1.0, repetition_penalty=1.3, logprobs=2),
    dict(temperature=0.0, prompt_logprobs=1),
    dict(temperature=0.7, top_p=0.9, min_p=0.01, frequency_penalty=0.4),
]


def start(folder: Path, world_size: int) -> Executor:
    plugins = load_plugins(quiet=True)
    args = EngineArgs(
        model=str(folder),
        device="reference",
        tensor_parallel_size=world_size,
        block_size=BLOCK,
        max_num_seqs=8,
        num_threads=1,
    )
    executor = make_executor(resolve(args, plugins, progress=False), plugins)
    try:
        executor.start()
        specs = executor.kv_cache_specs()
        spec = next(iter(specs.values()))
        executor.init_kv_cache(KVCacheConfig(64, (KVCacheGroup(tuple(specs), spec),)))
        executor.warm_up()
    except BaseException:
        executor.shutdown()
        raise
    return executor


def requests() -> list[NewRequest]:
    rng = random.Random(1)
    made = []
    for index, params in enumerate(KINDS):
        prompt = [rng.randrange(3, 1000) for _ in range(rng.randint(2, 30))]
        made.append(
            NewRequest(
                request_id=str(index), token_ids=prompt, num_prompt_tokens=len(prompt), num_computed_tokens=0,
                block_ids=[list(range(8 * index, 8 * index + 8))], params=SamplingParams(**params), seed=index,
                max_tokens=16,
            )
        )  # fmt: skip
    return made


def run(executor: Executor) -> list[StepResult]:
    """Chunked prompts, requests that join in the middle, one that leaves, and a step that all ranks refuse."""
    made = requests()
    results = []

    def step(**plan) -> None:
        executor.execute(StepPlan(step_id=len(results), **plan))
        results.append(executor.sample().result())

    step(new_requests=made[:2], num_scheduled_tokens={"0": 1, "1": len(made[1].token_ids)})
    rest = len(made[0].token_ids) - 1
    step(new_requests=made[2:], num_scheduled_tokens={"1": 1, "0": rest, "2": 2, "3": 2, "4": 2})
    with pytest.raises(ValueError, match="'nobody' is scheduled but not in the batch"):
        executor.execute(StepPlan(step_id=99, num_scheduled_tokens={"nobody": 1}))
    scheduled = {str(index): len(made[index].token_ids) - 2 for index in (2, 3, 4)}
    step(num_scheduled_tokens={"0": 1, "1": 1, **{name: count for name, count in scheduled.items() if count}})
    for _ in range(3):
        step(num_scheduled_tokens={str(index): 1 for index in range(5)})
    step(removed_request_ids=["1"], num_scheduled_tokens={str(index): 1 for index in (4, 3, 2, 0)})
    step(removed_request_ids=["0", "2", "3", "4"])
    return results


def test_two_ranks_sample_what_one_does(tiny_model):
    alone = start(tiny_model("llama"), 1)
    expected = run(alone)
    alone.shutdown()
    executor = start(tiny_model("llama"), 2)
    try:
        assert executor.available_kv_bytes() > 0
        results = run(executor)
        executor.check_health()
    finally:
        executor.shutdown()
    assert sum(len(result.sampled_token_ids) for result in results) > 20
    for result, wanted in zip(results, expected, strict=True):
        assert result.sampled_token_ids == wanted.sampled_token_ids
        for entries in ("logprobs", "prompt_logprobs"):
            got, want = getattr(result, entries), getattr(wanted, entries)
            assert got.keys() == want.keys()
            for name in want:
                for each, other in zip(got[name], want[name], strict=True):
                    assert each.chosen.token_id == other.chosen.token_id
                    assert each.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)


def test_a_rank_killed_at_work_raises_and_leaves_nothing(tiny_model, process_is_alive):
    executor = start(tiny_model("llama"), 2)
    assert isinstance(executor, MultiprocessExecutor)
    pids = executor.rank_pids
    try:
        request = NewRequest(
            request_id="a", token_ids=[5] * 30, num_prompt_tokens=30, num_computed_tokens=0,
            block_ids=[list(range(8))], params=SamplingParams(temperature=0.0), seed=0, max_tokens=16,
        )  # fmt: skip
        threading.Timer(0.5, os.kill, (pids[0], signal.SIGKILL)).start()
        started = time.monotonic()
        with pytest.raises(WorkerDiedError, match=r"rank 1 died \(signal 9\)"):
            for index in range(10**6):
                new, removed = [request], ["a"] if index else []
                plan = StepPlan(
                    step_id=index,
                    removed_request_ids=removed,
                    new_requests=new,
                    num_scheduled_tokens={"a": 30},
                )
                executor.execute(plan)
                executor.sample().result()
        assert time.monotonic() - started < 10
    finally:
        executor.shutdown()
    assert not any(map(process_is_alive, pids))
