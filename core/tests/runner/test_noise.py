"""Counter-based random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inferplane.runner.noise import exponentials, row_keys
from race_oracle import exponential, key_of, mix_64

SEEDS = [0, 1, 2**63, 2**64 - 1, 123456789]
INDICES = [0, 1, 7, 50_000, 2**31 - 1, 2**31, 2**31 + 500, 2**32 - 1]


def keys_of(seeds: list[int], position: int) -> torch.Tensor:
    return torch.from_numpy(row_keys(np.array(seeds, np.uint64), np.full(len(seeds), position)))


def test_the_mixer_is_that_of_splitmix64():
    # the first outputs of the published generator for seed 1234567
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        outputs.append(mix_64(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("position", [0, 1, 7, 100_000])
def test_they_equal_arithmetic_with_python_integers(position: int):
    keys = keys_of(SEEDS, position)
    for seed, (low, high) in zip(SEEDS, keys.T.tolist()):
        assert (high % 2**32 << 32) + low % 2**32 == key_of(seed, position)
    got = exponentials(keys, torch.tensor(INDICES))
    wanted = [[exponential(key_of(seed, position), index) for index in INDICES] for seed in SEEDS]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), torch.tensor(wanted, dtype=torch.float64), rtol=2e-6, atol=0)


def test_a_number_does_not_depend_on_the_others():
    keys, index = keys_of(list(range(40)), 3), torch.arange(100)
    together = exponentials(keys, index)
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    columns = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(exponentials(keys[:, rows], index[columns]), together[rows][:, columns])
    own = torch.stack([index[columns] for _ in range(40)])
    assert torch.equal(exponentials(keys, own), together[:, columns])


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds", "blocks"])
def test_they_are_exponential_and_neighbours_are_independent(along: str):
    count = 60_000
    numbers = np.arange(count)
    if along == "positions":
        keys, index = row_keys(np.full(count, 42, np.uint64), numbers), torch.tensor([17])
    elif along == "seeds":
        keys, index = row_keys(numbers.astype(np.uint64), np.zeros(count, np.int64)), torch.tensor([17])
    else:
        keys = row_keys(np.array([42], np.uint64), np.array([5]))
        index = torch.arange(count) + (2**31 if along == "blocks" else 0)
    values = exponentials(torch.from_numpy(keys), index).double().flatten().numpy()
    assert values.min() > 0
    assert np.isfinite(values).all()
    uniform = np.exp(-values)
    # 63 and 255 degrees of freedom, whose chi-squares are exceeded once in 50,000 times
    observed = np.histogram(uniform, 64, (0, 1))[0]
    assert ((observed - count / 64) ** 2 / (count / 64)).sum() < 120
    pairs = np.histogram2d(uniform[:-1], uniform[1:], 16, ((0, 1), (0, 1)))[0]
    assert ((pairs - count / 256) ** 2 / (count / 256)).sum() < 360


def test_the_first_of_many_arrives_when_it_should():
    """What a race looks at: the smallest of many, whose own distribution is exponential again."""
    count, racers = 4000, 500
    keys = torch.from_numpy(row_keys(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64)))
    first = exponentials(keys, torch.arange(racers)).amin(1).double().numpy() * racers
    observed = np.histogram(np.exp(-first), 32, (0, 1))[0]
    assert ((observed - count / 32) ** 2 / (count / 32)).sum() < 75  # 31 degrees: once in 60,000
