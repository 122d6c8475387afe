"""Decode graphs: what is recorded when, and that a recording which fails only costs the graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from inferplane.api import DeviceDescriptor, Graph, GraphBackend
from inferplane.api.attention import AttentionBackend, AttentionInputs
from inferplane.api.device import CallAgain
from inferplane.api.model import ForwardBatch, Model
from inferplane.plan import NewRequest
from inferplane.reference.platform import HostRuntime
from inferplane.request import SamplingParams
from inferplane.runner.batch import Batch
from inferplane.runner.graphs import DecodeGraphs
from inferplane.runner.kv_groups import KVGroup

BLOCK_SIZE, MAX_LEN, SCRATCH = 4, 32, 99


class SumOfInputs(Model):
    """Every input that a graph has, in one number for each row."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        inputs: AttentionInputs = batch.metadata["layer"]
        used = torch.arange(inputs.block_table.shape[1]) * BLOCK_SIZE < inputs.seq_lens.unsqueeze(1)
        blocks = (inputs.block_table * used).sum(1)
        columns = (batch.token_ids, batch.positions, inputs.seq_lens, inputs.slot_mapping, blocks)
        return torch.stack([column.double() for column in columns], 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("logits are computed outside of graphs")

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise AssertionError("there are none")

    def attention_layers(self) -> list:
        return []


class Inputs(AttentionBackend):
    name = "inputs"
    graph_safe = True

    @classmethod
    def unsupported_reason(cls, query):
        return None

    @classmethod
    def allocate_kv(cls, layer, num_blocks, dtype, device):
        return torch.zeros(0)

    def forward(self, layer, q, k, v, kv, metadata, *, sinks=None):
        raise AssertionError("not called")

    def refresh_metadata(self, metadata: Any, inputs: AttentionInputs) -> None:
        assert metadata is inputs
        self.refreshed_for = list(inputs.seq_lens_host)


class Counting(CallAgain):
    def __init__(self, fails_from: int = 99) -> None:
        self.captured: list[int] = []
        self.fails_from = fails_from

    def capture(self, run: Callable[[], None]) -> Graph:
        if len(self.captured) >= self.fails_from:
            raise RuntimeError("no more")
        self.captured.append(1)
        return super().capture(run)


class OnDemand(Counting):
    records_on_demand: ClassVar[bool] = True


class StagedRuntime(HostRuntime):
    is_host_memory = False  # type: ignore[assignment]


class Steps:
    """A batch whose requests decode, and the graphs that run it."""

    def __init__(self, backend: GraphBackend, sizes: list[int], *, staged: bool) -> None:
        self.batch = Batch(8, MAX_LEN, [BLOCK_SIZE])
        for number in range(8):
            num_tokens = 5 + number
            blocks = [10 * number + index for index in range(MAX_LEN // BLOCK_SIZE)]
            self.batch.add(
                NewRequest(
                    request_id=str(number),
                    token_ids=list(range(100 * number, 100 * number + num_tokens)),
                    num_prompt_tokens=num_tokens,
                    num_computed_tokens=num_tokens - 1,
                    block_ids=[blocks],
                    params=SamplingParams(),
                    seed=0,
                    max_tokens=4,
                    eos_token_ids=(),
                    bad_words_token_ids=(),
                )
            )
        runtime = (StagedRuntime if staged else HostRuntime)(DeviceDescriptor("null", 0, "null", 1 << 30))
        self.attention = Inputs()
        group = KVGroup(BLOCK_SIZE, ((self.attention, ("layer",)),))
        self.graphs = DecodeGraphs(
            SumOfInputs(), runtime, backend, {}, [group], sizes, max_model_len=MAX_LEN, scratch_blocks=[SCRATCH]
        )  # fmt: skip

    def check(self, *names: str) -> None:
        step = self.batch.prepare(dict.fromkeys(names, 1))
        assert self.graphs.can_run(step)
        hidden, sample_rows = self.graphs.run(step, torch.zeros(8, dtype=torch.int64))
        assert hidden.tolist() == [_expected(int(name)) for name in names]
        spare = len(self.attention.refreshed_for) - len(names)
        assert self.attention.refreshed_for == [5 + int(name) for name in names] + [1] * spare
        assert np.array_equal(sample_rows.numpy(), step.sample_rows)


def _expected(number: int) -> list[float]:
    position = 4 + number
    slot = (10 * number + position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE
    blocks = sum(10 * number + index for index in range(position // BLOCK_SIZE + 1))
    return [100 * number + position, position, position + 1, slot, blocks]


@pytest.mark.parametrize("staged", [False, True])
def test_a_ladder_is_recorded_at_the_start_and_spare_rows_fill_it(staged: bool) -> None:
    backend = Counting()
    steps = Steps(backend, [2, 6], staged=staged)
    steps.graphs.record()
    assert steps.graphs.sizes == [2, 6] and len(backend.captured) == 2
    for names in ("0", "31", "047", "765432", "5"):
        steps.check(*names)
    assert len(backend.captured) == 2
    assert not steps.graphs.can_run(steps.batch.prepare(dict.fromkeys("0123456", 1)))


@pytest.mark.parametrize("staged", [False, True])
def test_on_demand_each_size_is_recorded_once_when_it_comes_up(staged: bool) -> None:
    backend = OnDemand()
    steps = Steps(backend, [2, 6], staged=staged)
    steps.graphs.record()
    assert steps.graphs.sizes == [1]
    for names in ("021", "0", "765", "1234", "765432", "5"):
        steps.check(*names)
    assert steps.graphs.sizes == [1, 3, 4, 6] and len(backend.captured) == 4
    assert not steps.graphs.can_run(steps.batch.prepare(dict.fromkeys("0123456", 1)))


def test_rows_are_padded_to_those_of_graphs() -> None:
    ladder = Steps(Counting(), [2, 6], staged=False).graphs
    assert [ladder.padded(rows) for rows in (1, 2, 3, 6, 7, 13)] == [2, 2, 6, 6, 12, 18]
    assert Steps(OnDemand(), [2, 6], staged=False).graphs.padded(5) == 5


def test_all_steps_are_rehearsed_before_the_first_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed: list[int] = []

    class Rehearsing(Counting):
        def rehearse(self, runs) -> None:
            assert not self.captured and not calls
            for run in runs:
                run()
            rehearsed.append(len(runs))

    calls: list[ForwardBatch] = []
    forward = SumOfInputs.forward
    monkeypatch.setattr(
        SumOfInputs, "forward", lambda self, batch: calls.append(batch) or forward(self, batch)
    )
    steps = Steps(Rehearsing(), [2, 6], staged=False)
    steps.graphs.record()
    steps.check("0", "3")
    assert rehearsed == [2]


def test_recording_on_demand_writes_to_scratch_only() -> None:
    steps = Steps(OnDemand(), [8], staged=False)
    steps.graphs.record()
    steps.check("7")
    seen: list[tuple[list[int], list[int]]] = []

    class Spy(OnDemand):
        def capture(self, run: Callable[[], None]) -> Graph:
            inputs = steps.graphs._inputs
            seen.append((inputs.slots[0].tolist(), inputs.tables[0].unique().tolist()))
            return super().capture(run)

    steps.graphs._backend = Spy()
    steps.check("1", "2")
    assert seen == [([SCRATCH * BLOCK_SIZE] * 8, [SCRATCH])]


def test_a_recording_that_fails_ends_the_graphs_and_nothing_else(caplog) -> None:
    with pytest.raises(RuntimeError, match="no more"):
        Steps(Counting(1), [2, 6], staged=False).graphs.record()
    steps = Steps(OnDemand(2), [8], staged=False)
    steps.graphs.record()
    steps.check("3", "4")
    assert not steps.graphs.can_run(steps.batch.prepare(dict.fromkeys("012", 1)))
    assert "recording failed: no more" in caplog.text
    assert not steps.graphs.can_run(steps.batch.prepare({"0": 1}))
