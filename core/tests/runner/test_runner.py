"""The runner over a model whose logits say which tokens it saw, and where."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from inferplane.api.attention import AttentionInputs
from inferplane.api.comm import Communicator
from inferplane.api.model import ForwardBatch, Model
from inferplane.api.worker import PendingStep
from inferplane.plan import StepPlan
from inferplane.runner.batch import Batch
from inferplane.runner.kv_groups import KVGroup
from inferplane.runner.runner import Runner
from inferplane.runner.sampler import Sampler
from model_harness import run_ranks

VOCAB = 50
BLOCK_SIZE = 4


class SumModel(Model):
    """Keeps tokens in its "KV" and predicts the sum of all tokens of the sequence so far, modulo the vocabulary."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.num_tokens: list[int] = []
        self.fails = False

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("out of breath")
        inputs: AttentionInputs = batch.metadata["layer"]
        store = batch.kv["layer"]
        self.num_tokens.append(len(batch.token_ids))
        store[inputs.slot_mapping] = batch.token_ids
        rows = []
        for index, (query_len, seq_len) in enumerate(zip(inputs.query_lens_host, inputs.seq_lens_host)):
            blocks = inputs.block_table[index].long()
            slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:seq_len]
            rows.append(store[slots].cumsum(0)[seq_len - query_len :])
        return (torch.cat(rows) % VOCAB)[:, None].float()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = -(torch.arange(VOCAB)[None] - hidden).abs()
        return logits.to(torch.float32)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise AssertionError("not called")

    def attention_layers(self) -> list:
        return []


@pytest.fixture
def model() -> SumModel:
    return SumModel()


@pytest.fixture
def make_runner(runtime, model):
    def make(samples: bool = True, max_num_reqs: int = 4, comm: Communicator | None = None) -> Runner:
        backend = SimpleNamespace(build_metadata=lambda inputs: inputs)
        return Runner(
            model=model,
            runtime=runtime,
            kv={"layer": torch.zeros(400, dtype=torch.int64)},
            groups=[KVGroup(BLOCK_SIZE, ((backend, ("layer",)),))],  # type: ignore[arg-type]
            batch=Batch(max_num_reqs, 64, [BLOCK_SIZE]),
            sampler=Sampler(max_num_reqs, VOCAB, runtime) if samples else None,
            vocab_size=VOCAB,
            comm=comm,
        )

    return make


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB)
    return tokens[len(prompt) :]


def kv_of(runner: Runner, request_id: str) -> list[int]:
    """The tokens that a `SumModel` keeps of a request, up to the end of its blocks."""
    batch = runner.batch
    row = batch.row_of(request_id)
    blocks = batch._block_tables[0][row, : batch._num_blocks[0, row]]
    return torch.cat([runner._kv["layer"][block * BLOCK_SIZE :][:BLOCK_SIZE] for block in blocks]).tolist()


def step(runner: Runner, **plan) -> dict[str, list[int]]:
    runner.execute(StepPlan(step_id=1, **plan))
    result = runner.sample().result()
    assert not result.errors
    return result.sampled_token_ids


def test_chunks_joining_and_leaving_requests_give_each_its_own_tokens(make_runner, model, new_request):
    runner = make_runner(max_num_reqs=3)
    a, b, c = [7, 1, 30, 2, 9, 9, 4], [3, 3], [1, 2, 3, 4, 5]
    greedy = dict(temperature=0.0)
    got: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def run(**plan):
        for name, tokens in step(runner, **plan).items():
            got[name] += tokens

    run(new_requests=[new_request("a", a, block_ids=[[40, 9]], **greedy)], num_scheduled_tokens={"a": 3})
    run(
        new_requests=[new_request("b", b, block_ids=[[11]], **greedy)],
        num_scheduled_tokens={"b": 2, "a": 3},
    )
    assert got == {"a": [], "b": continuation(b, 1), "c": []}
    run(num_scheduled_tokens={"a": 1, "b": 1})
    run(new_block_ids={"a": [[77]], "b": [[2]]}, num_scheduled_tokens={"a": 1, "b": 1})
    run(
        removed_request_ids=["a"],
        new_requests=[new_request("c", c, block_ids=[[9, 40]], **greedy)],
        num_scheduled_tokens={"c": 5, "b": 1},
    )
    run(num_scheduled_tokens={"b": 1, "c": 1})
    assert got == {"a": continuation(a, 2), "b": continuation(b, 5), "c": continuation(c, 2)}
    assert model.num_tokens == [3, 5, 2, 2, 6, 2]
    run(removed_request_ids=["b", "c"])
    assert len(runner.batch) == 0
    assert len(model.num_tokens) == 6, "a plan that runs nothing calls no model"


class WantedRows(SumModel):
    """Gives out no other hidden states than it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int | None] = []

    def forward(self, batch):
        hidden, rows = super().forward(batch), batch.output_rows
        self.asked.append(None if rows is None else len(rows))
        return hidden if rows is None else hidden[rows]


@pytest.mark.parametrize(("padded", "asked"), [(1, [1, 1, None, 2]), (3, [None, 3, None, None])])
def test_a_model_may_compute_the_wanted_rows_alone(padded, asked, make_runner, new_request):
    """Of a chunk without a wanted one the first; never more than there are tokens."""
    model = WantedRows()
    runner = make_runner(max_num_reqs=3)
    runner._model = model
    runner._padded = lambda rows: -(-rows // padded) * padded
    a, b = [7, 1, 30, 2, 9, 9, 4], [3, 3]
    greedy = dict(temperature=0.0)
    assert (
        step(
            runner,
            new_requests=[new_request("a", a, block_ids=[[40, 9]], **greedy)],
            num_scheduled_tokens={"a": 3},
        )
        == {}
    )
    got = step(
        runner,
        new_requests=[new_request("b", b, block_ids=[[11]], **greedy)],
        num_scheduled_tokens={"a": 3, "b": 2},
    )
    assert got == {"b": continuation(b, 1)}
    got = step(runner, num_scheduled_tokens={"a": 1, "b": 1})
    assert got == {"a": continuation(a, 1), "b": continuation(b, 2)[1:]}
    c = [1, 2]
    got = step(
        runner,
        new_requests=[new_request("c", c, block_ids=[[13]], **greedy)],
        num_scheduled_tokens={"a": 1, "c": 2},
    )
    assert got == {"a": continuation(a, 2)[1:], "c": continuation(c, 1)}
    assert model.asked == asked


def test_prompt_logprobs_of_one_request_keep_all_rows(make_runner, new_request):
    model = WantedRows()
    runner = make_runner()
    runner._model = model
    a, b, greedy = [7, 1, 30], [3, 3, 4], dict(temperature=0.0)
    requests = [
        new_request("a", a, block_ids=[[40]], prompt_logprobs=1, **greedy),
        new_request("b", b, block_ids=[[11]], **greedy),
    ]
    assert step(runner, new_requests=requests, num_scheduled_tokens={"a": 3, "b": 3}) == {
        "a": continuation(a, 1),
        "b": continuation(b, 1),
    }
    assert model.asked == [None]


def test_a_prefix_hit_computes_only_the_rest(make_runner, model, new_request):
    runner = make_runner()
    prompt = [5, 6, 7, 8, 9, 10]
    first = step(
        runner,
        new_requests=[new_request("a", prompt, block_ids=[[1, 2]], temperature=0.0)],
        num_scheduled_tokens={"a": 6},
    )
    hit = new_request("b", prompt, num_computed_tokens=4, block_ids=[[1, 3]], temperature=0.0)
    second = step(runner, removed_request_ids=["a"], new_requests=[hit], num_scheduled_tokens={"b": 2})
    assert first["a"] == second["b"] == continuation(prompt, 1)
    assert model.num_tokens == [6, 2]


def test_prompt_logprobs_come_with_the_chunks_that_compute_them(make_runner, new_request, monkeypatch):
    from inferplane.runner import runner as module

    monkeypatch.setattr(module, "PROMPT_SLICE_ELEMENTS", 2 * VOCAB)  # three rows a slice
    prompt = [7, 1, 30, 2, 9, 9, 4, 12, 13, 8]
    runner = make_runner()
    request = new_request(
        "a", prompt, block_ids=[[1, 2, 3]], temperature=0.0, prompt_logprobs=2, max_tokens=0
    )
    entries = []
    for index, count in enumerate((4, 5, 1)):
        plan = StepPlan(
            step_id=index, new_requests=[request] if index == 0 else [], num_scheduled_tokens={"a": count}
        )
        runner.execute(plan)
        result = runner.sample().result()
        assert result.sampled_token_ids == {}, "max_tokens 0 asks for no token"
        entries += result.prompt_logprobs.get("a", [])
    logits = -(torch.arange(VOCAB)[None] - (torch.tensor(prompt).cumsum(0) % VOCAB)[:, None]).abs().double()
    expected = logits.log_softmax(-1)
    assert [entry.chosen.token_id for entry in entries] == prompt[1:]
    for position, entry in enumerate(entries):
        assert entry.chosen.logprob == pytest.approx(
            expected[position, prompt[position + 1]].item(), abs=1e-5
        )
        assert entry.chosen.rank == 1 + (expected[position] > expected[position, prompt[position + 1]]).sum()
        assert entry.top[0].token_id == sum(prompt[: position + 1]) % VOCAB
        assert len(entry.top) == 2


def test_logprobs_are_of_the_model_and_not_of_the_settings(make_runner, new_request):
    runner = make_runner()
    request = new_request("a", [4], block_ids=[[0]], temperature=0.0, logprobs=1, logit_bias={9: 100})
    runner.execute(StepPlan(step_id=1, new_requests=[request], num_scheduled_tokens={"a": 1}))
    result = runner.sample().result()
    assert result.sampled_token_ids == {"a": [9]}
    (entry,) = result.logprobs["a"]
    assert (entry.chosen.token_id, entry.top[0].token_id) == (9, 4)
    assert entry.chosen.logprob == pytest.approx(entry.top[0].logprob - 5, abs=1e-5)


def test_an_error_of_one_request_is_reported_once_and_leaves_the_others(make_runner, new_request):
    runner = make_runner()
    bad = new_request("bad", [1, 2], block_ids=[[1]], logits_processors={"nowhere": None})
    good = new_request("good", [1, 2], block_ids=[[2]], temperature=0.0)
    runner.execute(StepPlan(step_id=1, new_requests=[bad, good], num_scheduled_tokens={"bad": 1, "good": 2}))
    result = runner.sample().result()
    assert result.sampled_token_ids == {"good": [3]}
    assert result.errors.keys() == {"bad"}
    assert "'nowhere' is unknown" in result.errors["bad"]
    assert step(runner, removed_request_ids=["bad"], num_scheduled_tokens={"good": 1}) == {"good": [6]}


def test_after_a_step_that_raised_the_next_plan_finds_a_batch_in_order(make_runner, model, new_request):
    runner = make_runner(max_num_reqs=2)
    a = new_request("a", [1, 2, 3], block_ids=[[1]], temperature=0.0)
    step(runner, new_requests=[a], num_scheduled_tokens={"a": 2})
    model.fails = True
    b = new_request("b", [4], block_ids=[[2]], temperature=0.0)
    with pytest.raises(RuntimeError, match="out of breath"):
        runner.execute(StepPlan(step_id=2, new_requests=[b], num_scheduled_tokens={"a": 1, "b": 1}))
    with pytest.raises(RuntimeError, match="no executed plan"):
        runner.sample().result()
    model.fails = False
    # the scheduler takes all of them out, those of which the worker never heard too, and starts again
    tokens = step(
        runner,
        removed_request_ids=["a", "b", "never seen"],
        new_requests=[b, a],
        num_scheduled_tokens={"b": 1, "a": 3},
    )
    assert tokens == {"b": [4], "a": [6]}


def test_ranks_that_do_not_sample_follow_the_one_that_does_without_its_results(make_runner, new_request):
    """Five steps ahead, though an engine is never more than one."""
    plans = [
        StepPlan(
            step_id=1,
            new_requests=[
                new_request("a", [1, 2], block_ids=[[1]], temperature=0.8, seed=3, prompt_logprobs=0),
                new_request("b", [4, 4, 4], block_ids=[[20]], temperature=0.0),
            ],
            num_scheduled_tokens={"a": 2, "b": 1},
        ),
        StepPlan(step_id=2, new_block_ids={"a": [[2]]}, num_scheduled_tokens={"b": 1, "a": 1}),
        *[
            StepPlan(
                step_id=3 + i,
                new_block_ids={"a": [[3 + i]], "b": [[21 + i]]},
                num_scheduled_tokens={"a": 1, "b": 1},
            )
            for i in range(4)
        ],
    ]

    def work(comm: Communicator) -> tuple[Runner, list[PendingStep]]:
        runner, pending = make_runner(samples=comm.rank == 0, comm=comm), []
        for plan in plans:
            runner.execute(plan)
            if comm.rank == 0:
                pending.append(runner.sample())
            else:
                runner.accept()
        return runner, pending

    (leader, pending), *others = run_ranks(3, work)
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    for each in pending:
        for name, token_ids in each.result().sampled_token_ids.items():
            tokens[name] += token_ids
    assert tokens["b"] == continuation([4, 4, 4], 4)
    assert len(tokens["a"]) == 6
    for runner, _ in others:
        for name in tokens:
            row, leaders = runner.batch.row_of(name), leader.batch.row_of(name)
            assert runner.batch.num_tokens[row] == leader.batch.num_tokens[leaders]
            stored = [kv_of(each, name)[: len(tokens[name]) + 1] for each in (runner, leader)]
            assert stored[0] == stored[1]
    runner, _ = others[0]
    runner.execute(StepPlan(step_id=9, num_scheduled_tokens={"a": 1}))
    with pytest.raises(RuntimeError, match="does not sample"):
        runner.sample()


def test_a_sampler_that_raises_leaves_no_rank_waiting(make_runner, new_request, monkeypatch):
    def fail(*args: object) -> None:
        raise OSError("no dice")

    def work(comm: Communicator) -> dict[str, list[int]]:
        runner = make_runner(samples=comm.rank == 0, comm=comm)
        greedy = new_request("a", [1, 2], block_ids=[[1]], temperature=0.0)
        runner.execute(StepPlan(step_id=1, new_requests=[greedy], num_scheduled_tokens={"a": 2}))
        again = StepPlan(
            step_id=2, removed_request_ids=["a"], new_requests=[greedy], num_scheduled_tokens={"a": 2}
        )
        if comm.rank == 0:
            with monkeypatch.context() as patch, pytest.raises(OSError, match="no dice"):
                patch.setattr(runner._sampler, "sample", fail)
                runner.sample()
            runner.execute(again)
            return runner.sample().result().sampled_token_ids
        runner.accept()
        runner.execute(again)
        runner.accept()
        return {}

    assert run_ranks(2, work)[0] == {"a": [3]}
