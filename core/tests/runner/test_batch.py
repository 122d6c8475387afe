"""The persistent batch against a model of it made of lists."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferplane.plan import NewRequest
from inferplane.request import SamplingParams
from inferplane.runner.batch import Batch, BatchError

BLOCK_SIZES = (4, 6)


@dataclass
class ListRequest:
    """What a batch should know of a request, token by token."""

    tokens: list[int]
    num_prompt: int
    num_computed: int
    blocks: list[list[int]] = field(default_factory=lambda: [[] for _ in BLOCK_SIZES])

    def grow(self, num_tokens: int, rng: random.Random) -> list[list[int]]:
        added = []
        for blocks, size in zip(self.blocks, BLOCK_SIZES):
            missing = max(0, -(-num_tokens // size) - len(blocks))
            added.append([rng.randrange(1000) for _ in range(missing)])
            blocks += added[-1]
        return added


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_steps_are_those_of_a_model_made_of_lists(seed: int, capacity: int):
    rng = random.Random(seed)
    batch, model, names = Batch(capacity, 40, BLOCK_SIZES), {}, iter(range(10**6))
    for _ in range(25):
        for name in [name for name in model if rng.random() < 0.15]:
            assert batch.remove(name) is not None
            del model[name]
        while len(model) < capacity and rng.random() < 0.5:
            name = str(next(names))
            tokens = [rng.randrange(500) for _ in range(rng.randint(1, 30))]
            request = ListRequest(tokens, rng.randint(1, len(tokens)), rng.randrange(len(tokens)))
            model[name] = request
            blocks = request.grow(len(tokens), rng)
            batch.add(
                NewRequest(
                    request_id=name, token_ids=tokens, num_prompt_tokens=request.num_prompt,
                    num_computed_tokens=request.num_computed, block_ids=blocks, params=SamplingParams(), seed=0,
                    max_tokens=9,
                )
            )  # fmt: skip
        scheduled = {}
        for name in rng.sample(sorted(model), rng.randint(0, len(model))):
            request = model[name]
            if request.num_computed < len(request.tokens) < 40:
                scheduled[name] = rng.randint(1, len(request.tokens) - request.num_computed)
        step = batch.prepare(scheduled)
        check_step(step, scheduled, model)
        batch.advance(step)
        for name, count in scheduled.items():
            request = model[name]
            request.num_computed += count
            if request.num_computed == len(request.tokens):
                token = rng.randrange(500)
                request.tokens.append(token)
                append(batch, name, token)
                batch.append_blocks(name, request.grow(len(request.tokens), rng))
        for name, request in model.items():
            row = batch.row_of(name)
            assert batch.known_tokens(row).tolist() == request.tokens
            assert batch.output_tokens(row).tolist() == request.tokens[request.num_prompt :]
    assert len(batch) == len(model)


def append(batch: Batch, name: str, token: int) -> None:
    places = batch.reserve(np.array([batch.row_of(name)]))
    batch.fill(places, np.array([token]))


def check_step(step, scheduled, model):
    tokens, positions, slots = [], [], [[] for _ in BLOCK_SIZES]
    sampled = []
    for index, (name, count) in enumerate(scheduled.items()):
        request = model[name]
        end = request.num_computed + count
        for position in range(request.num_computed, end):
            tokens.append(request.tokens[position])
            positions.append(position)
            for group, size in enumerate(BLOCK_SIZES):
                slots[group].append(request.blocks[group][position // size] * size + position % size)
        if end == len(request.tokens):
            sampled.append(len(tokens) - 1)
        assert step.query_lens[index] == count
        assert step.query_start[index + 1] == len(tokens)
        assert step.seq_lens[index] == end
        for group, size in enumerate(BLOCK_SIZES):
            used = -(-end // size)
            assert step.groups[group].block_table[index, :used].tolist() == request.blocks[group][:used]
    assert step.num_tokens == len(tokens)
    assert step.token_ids.tolist() == tokens
    assert step.positions.tolist() == positions
    assert [group.slot_mapping.tolist() for group in step.groups] == slots
    assert step.sample_tokens.tolist() == sampled
    assert (step.token_ids.dtype, step.positions.dtype, step.groups[0].slot_mapping.dtype) == (np.int64,) * 3
    assert (step.query_start.dtype, step.seq_lens.dtype, step.groups[0].block_table.dtype) == (np.int32,) * 3


def test_what_does_not_fit_is_refused_by_name(new_request):
    batch = Batch(1, 8, [4])
    batch.add(new_request("a", [1, 2, 3, 4, 5], block_ids=[[0]]))
    with pytest.raises(BatchError, match=r"'b' is one more than the 1"):
        batch.add(new_request("b", [1]))
    with pytest.raises(BatchError, match="'a' is in the batch already"):
        batch.add(new_request("a", [1]))
    with pytest.raises(BatchError, match="'c' is scheduled but not in the batch"):
        batch.prepare({"c": 1})
    with pytest.raises(BatchError, match=r"'a' is scheduled for 6 tokens up to token 6, but 5 are known"):
        batch.prepare({"a": 6})
    with pytest.raises(BatchError, match=r"'a' is scheduled for 0 tokens"):
        batch.prepare({"a": 0})
    with pytest.raises(BatchError, match=r"'a' is scheduled up to token 5, but its blocks hold 4"):
        batch.prepare({"a": 5})
    with pytest.raises(BatchError, match=r"2 KV groups, not 1"):
        batch.append_blocks("a", [[1], [2]])
    with pytest.raises(BatchError, match=r"more blocks \(5\) than its longest context needs"):
        batch.append_blocks("a", [[1, 2, 3, 4]])
    assert batch.remove("a") == 0
    assert batch.remove("a") is None
    with pytest.raises(BatchError, match="'long' has 9 tokens"):
        batch.add(new_request("long", list(range(9))))
    assert len(batch) == 0


def test_a_request_without_output_to_come_is_not_sampled(new_request):
    batch = Batch(2, 8, [4])
    batch.add(new_request("score", [1, 2], block_ids=[[0]], max_tokens=0))
    batch.add(new_request("complete", [1, 2], block_ids=[[1]]))
    step = batch.prepare({"score": 2, "complete": 2})
    assert step.sample_rows.tolist() == [batch.row_of("complete")]
    assert step.sample_tokens.tolist() == [3]


def test_prompt_spans_name_each_prompt_token_but_the_first_once(new_request):
    batch = Batch(2, 64, [16])
    prompt = list(range(100, 120))
    batch.add(new_request("other", [1, 2, 3], block_ids=[[0]]))
    batch.add(new_request("a", prompt, block_ids=[[1, 2]], prompt_logprobs=3))
    seen = []
    for chunk in (1, 7, 11, 1):
        step = batch.prepare({"other": 1, "a": chunk} if not seen else {"a": chunk})
        for span in step.prompt_spans:
            assert (span.request_id, span.num_top) == ("a", 3)
            # the row that predicts a token holds the one before it
            predicting = step.token_ids[span.first_token : span.first_token + len(span.token_ids)]
            assert (predicting + 1).tolist() == span.token_ids.tolist()
            seen += span.token_ids.tolist()
        batch.advance(step)
    assert seen == prompt[1:]
    append(batch, "a", 7)
    assert batch.prepare({"a": 1}).prompt_spans == []
    batch.remove("a")
    again = new_request("a", [*prompt, 7], num_prompt_tokens=20, block_ids=[[1, 2]], prompt_logprobs=3)
    batch.add(again)
    assert batch.prepare({"a": 21}).prompt_spans == [], "a preempted request has reported on its prompt"


def test_preparing_256_decoding_requests_takes_a_fraction_of_a_millisecond(new_request):
    batch = Batch(256, 4096, [16])
    for index in range(256):
        batch.add(new_request(str(index), [7] * 500, num_computed_tokens=499, block_ids=[list(range(32))]))
    scheduled = {str(index): 1 for index in range(256)}
    times = []
    for _ in range(200):
        started = time.perf_counter()
        batch.prepare(scheduled)
        times.append(time.perf_counter() - started)
    assert min(times) < 1e-3
    print(f"prepare: {min(times) * 1e6:.0f} µs")
