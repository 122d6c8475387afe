"""A tiny real model with every part of the step loop on and off: the answers are the same.

The device is the host, behind a runtime that says that it has memory of its own, so that steps are staged, and whose
graphs call again what they recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from inferplane import LLM, RequestOutput, SamplingParams
from inferplane.api import DeviceDescriptor, DeviceRuntime, GraphBackend
from inferplane.api.device import CallAgain
from inferplane.reference.attention import ReferenceAttention
from inferplane.reference.platform import HostRuntime, ReferencePlatform
from inferplane.request import PositionLogprobs

pytestmark = pytest.mark.usefixtures("no_step_raises")

SETTINGS: dict[str, Any] = dict(
    device="reference", dtype="float32", max_num_seqs=6, max_num_batched_tokens=24, block_size=8
)
PROMPTS = [[5, 9, 2, 70], [7], [3] * 20, [11, 12] * 8, [5, 9, 2, 70, 71], [300, 2, 8] * 10, [40], [9] * 9]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, seed=4, max_tokens=9, ignore_eos=True, frequency_penalty=1.0),
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, prompt_logprobs=1, logprobs=0),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=11, ignore_eos=True, min_tokens=4),
    SamplingParams(temperature=0.0, max_tokens=1),
    SamplingParams(temperature=1.2, min_p=0.05, seed=6, max_tokens=13, ignore_eos=True, logit_bias={7: 3.0}),
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, repetition_penalty=1.3),
]


class StagedRuntime(HostRuntime):
    """Host memory that passes for a device's own."""

    is_host_memory = False  # type: ignore[assignment]

    def graphs(self) -> GraphBackend | None:
        return CallAgain()

    def measure_peak_bytes(self, run: Callable[[], None]) -> int | None:
        run()
        return 1 << 20


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    def device_runtime(self: ReferencePlatform, device: DeviceDescriptor) -> DeviceRuntime:
        return StagedRuntime(device)

    monkeypatch.setattr(ReferencePlatform, "device_runtime", device_runtime)
    monkeypatch.setattr(ReferenceAttention, "graph_safe", True)


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def run(folder: Path, params: list[SamplingParams] = PARAMS, **settings: Any) -> list[RequestOutput]:
    settings = {**SETTINGS, "kv_cache_bytes": 8 << 20, **settings}
    with LLM(str(folder), **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
        stats = llm.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_blocks == stats.num_blocks
        if settings.get("kv_cache_bytes") == SMALL_POOL_BYTES:
            assert stats.num_preemptions > 0
    return outputs


SMALL_POOL_BYTES = 9 * 4096
"""Of nine blocks: a few of the requests fit at once."""


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[RequestOutput]:
    return run(folder, enable_graphs=False, async_scheduling=False)


def check(found: list[RequestOutput], plain: list[RequestOutput]) -> None:
    for one, other in zip(found, plain, strict=True):
        [ours], [theirs] = one.outputs, other.outputs
        assert ours.token_ids == theirs.token_ids
        assert (ours.finish_reason, ours.stop_reason, ours.text) == (
            theirs.finish_reason, theirs.stop_reason, theirs.text,
        )  # fmt: skip
        check_logprobs(ours.logprobs, theirs.logprobs)
        check_logprobs(one.prompt_logprobs, other.prompt_logprobs)


def check_logprobs(ours: Sequence[Any] | None, theirs: Sequence[Any] | None) -> None:
    assert (ours is None) == (theirs is None)
    for mine, other in zip(ours or [], theirs or [], strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            ids, logprobs = _flat(mine)
            other_ids, other_logprobs = _flat(other)
            assert ids == other_ids
            assert logprobs == pytest.approx(other_logprobs, abs=1e-4)


def _flat(entry: PositionLogprobs) -> tuple[list[int], list[float]]:
    tokens = [entry.chosen, *entry.top]
    return [token.token_id for token in tokens], [token.logprob for token in tokens]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_on_the_host(folder: Path, plain: list[RequestOutput], async_scheduling: bool):
    check(run(folder, async_scheduling=async_scheduling), plain)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("batch_sizes", [None, "1,3", ""])
def test_staged_and_replayed(
    staged: None, folder: Path, plain: list[RequestOutput], async_scheduling: bool, batch_sizes: str | None
):
    graphs = {"enable_graphs": False} if batch_sizes == "" else {"graph_batch_sizes": batch_sizes}
    check(run(folder, async_scheduling=async_scheduling, **graphs), plain)


@pytest.mark.parametrize("enable_graphs", [False, True])
def test_when_the_pool_runs_out(staged: None, folder: Path, plain: list[RequestOutput], enable_graphs: bool):
    found = run(
        folder,
        async_scheduling=True,
        enable_graphs=enable_graphs,
        kv_cache_bytes=SMALL_POOL_BYTES,
        max_model_len=60,
    )
    check(found, plain)


def test_over_two_ranks(folder: Path, plain: list[RequestOutput]):
    """In one engine, because it takes long to start: requests that are dropped in flight, a pool that runs out, and
    stops that are found late."""
    settings = {**SETTINGS, "kv_cache_bytes": SMALL_POOL_BYTES // 2, "max_model_len": 60}
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with LLM(str(folder), tensor_parallel_size=2, num_threads=1, async_scheduling=True, **settings) as llm:
        for index in (0, 3):
            drop_in_flight(llm, index, plain[index])
        check(llm.generate(prompts, PARAMS, use_tqdm=False), plain)
        assert llm.stats().num_preemptions > 0
        stops = [output.outputs[0].token_ids[:7][-1] for output in plain]
        params = [
            SamplingParams(**{**_settings(each), "stop_token_ids": [stop], "min_tokens": 0})
            for each, stop in zip(PARAMS, stops)
        ]
        for output, stop, other in zip(llm.generate(prompts, params, use_tqdm=False), stops, plain):
            whole = other.outputs[0].token_ids
            assert output.outputs[0].token_ids == whole[: whole.index(stop) + 1]
        texts = [output.outputs[0].text for output in plain]
        params = [
            SamplingParams(**{**_settings(each), "stop": [text[5:8]] if text[5:8] else [], "min_tokens": 0})
            for each, text in zip(PARAMS, texts)
        ]
        for output, each, text in zip(llm.generate(prompts, params, use_tqdm=False), params, texts):
            assert output.outputs[0].text == (text[: text.index(each.stop[0])] if each.stop else text)
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_stops_that_are_found_late(staged: None, folder: Path, plain: list[RequestOutput]):
    stops = [output.outputs[0].token_ids[:7][-1] for output in plain]
    params = [
        SamplingParams(**{**_settings(each), "stop_token_ids": [stop]}) for each, stop in zip(PARAMS, stops)
    ]
    check(
        run(folder, params, async_scheduling=True),
        run(folder, params, async_scheduling=False, enable_graphs=False),
    )


def _settings(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def drop_in_flight(llm: LLM, index: int, plain: RequestOutput) -> None:
    """One of the requests, after its fifth token."""
    stream = llm.stream({"prompt_token_ids": PROMPTS[index]}, PARAMS[index])
    for output in stream:
        if len(output.outputs[0].token_ids) == 5:
            break
    stream.close()
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids[:5]


def test_requests_that_are_dropped_in_flight(staged: None, folder: Path, plain: list[RequestOutput]):
    with LLM(str(folder), async_scheduling=True, kv_cache_bytes=8 << 20, **SETTINGS) as llm:
        for index in (0, 3, 6):
            drop_in_flight(llm, index, plain[index])
        check(llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False), plain)
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_memory_is_what_a_measured_step_leaves(staged: None, folder: Path):
    with LLM(str(folder), memory_share=0.5, max_model_len=64, **SETTINGS) as llm:
        # no more than all requests at their longest need
        assert llm.stats().num_blocks == 6 * (64 // 8 + 1)
