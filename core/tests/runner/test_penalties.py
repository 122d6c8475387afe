"""Penalties by counts on the device against their definitions over lists of tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferplane.request import SamplingParams
from inferplane.runner import penalties as penalties_module
from inferplane.runner.penalties import Penalties, TokenCounts

VOCAB = 23


@dataclass
class PlainRow:
    params: SamplingParams
    prompt: list[int]
    output: list[int]

    def apply(self, logits: list[float]) -> list[float]:
        p = self.params
        changed = []
        for token, x in enumerate(logits):
            if token in self.prompt or token in self.output:
                x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
            if token in self.output:
                x -= p.presence_penalty + p.frequency_penalty * self.output.count(token)
            changed.append(x)
        return changed


def random_row(rng: random.Random) -> PlainRow:
    params = SamplingParams(
        repetition_penalty=rng.choice([1.0, rng.uniform(0.5, 2.5)]),
        frequency_penalty=rng.choice([0.0, rng.uniform(-2, 2)]),
        presence_penalty=rng.choice([0.0, rng.uniform(-2, 2)]),
    )
    prompt, output = ([rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 9, 40]))] for _ in range(2))
    return PlainRow(params, prompt, output)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 64]))
def test_rows_that_come_go_and_grow_are_penalised_by_the_definitions(seed: int, min_room: int):
    """Any rows at a time, in any order; tokens are handed over as a device that ran ahead does, by a tensor."""
    rng = random.Random(seed)
    num_rows = rng.randint(1, 5)
    plain: dict[int, PlainRow] = {}
    with mock.patch.object(penalties_module, "MIN_ROOM", min_room):
        made = Penalties(num_rows, make_runtime())
        for _ in range(40):
            row = rng.randrange(num_rows)
            if row not in plain:
                plain[row] = new = random_row(rng)
                made.add(row, new.params, np.array(new.prompt, np.int32), np.array(new.output, np.int32))
            elif rng.random() < 0.1:
                del plain[row]
                made.remove(row)
            rows = rng.sample(sorted(plain), rng.randint(0, len(plain)))
            penalised = made.of(np.array(rows, np.int64))
            is_wanted = [plain[row].params != SamplingParams() for row in rows]
            assert (penalised is not None) == any(is_wanted)
            if penalised is None:
                continue
            logits = torch.tensor([[rng.uniform(-9, 9) for _ in range(VOCAB)] for _ in rows])
            logits[rng.randrange(len(rows)), rng.randrange(VOCAB)] = float("-inf")
            expected = [plain[row].apply(given) for row, given in zip(rows, logits.tolist())]
            penalised.apply(logits)
            torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-6, atol=1e-5)
            tokens = [rng.randrange(VOCAB) for _ in rows]
            penalised.append(torch.tensor(tokens))
            for row, token in zip(rows, tokens):
                plain[row].output.append(token)


def test_a_long_output_keeps_all_its_tokens(runtime):
    counts = TokenCounts(2, runtime)
    counts.add(1, np.zeros(0, np.int32), np.zeros(0, np.int32))
    row = np.array([1])
    for token in [*range(500), 5, 5]:
        counts.append(row, counts.entries(row), torch.tensor([token]))
    entries = counts.entries(row)
    found = dict(zip(entries.ids.tolist(), entries.counts.tolist()))
    assert found == {**dict.fromkeys(range(500), 1), 5: 3}


def test_memory_follows_those_who_are_there(runtime):
    """Of requests that came and went nothing is left but what the largest crowd among them took."""
    counts = TokenCounts(4, runtime)
    tokens = np.arange(100, dtype=np.int32)
    for index in range(200):
        counts.add(index % 4, tokens, tokens[:50])
        if index >= 3:
            counts.remove((index + 1) % 4)
    assert len(counts._ids) <= 4 * 4 * (2 * 100 + penalties_module.MIN_ROOM)


@pytest.mark.parametrize(
    "params", [dict(repetition_penalty=1.5), dict(frequency_penalty=0.5), dict(presence_penalty=-1.0)]
)
def test_the_first_token_of_a_request(runtime, params: dict[str, float]):
    """Only the repetition penalty has anything to look at yet."""
    made = Penalties(3, runtime)
    prompt = np.array([2, 2, 4], np.int32)
    made.add(1, SamplingParams(**params), prompt, prompt[:0])
    penalised = made.of(np.array([0, 1]))
    assert penalised is not None
    logits = torch.ones(2, 6)
    penalised.apply(logits)
    expected = [1.0, 1.0, 2 / 3, 1.0, 2 / 3, 1.0] if "repetition_penalty" in params else [1.0] * 6
    assert logits.tolist() == [[1.0] * 6, pytest.approx(expected)]


def make_runtime():
    from inferplane.api import DeviceDescriptor
    from inferplane.reference.platform import HostRuntime

    return HostRuntime(DeviceDescriptor("reference", 0, "host", 1 << 30))
