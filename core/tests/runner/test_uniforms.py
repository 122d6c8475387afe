"""Counter-based random numbers."""

from __future__ import annotations

import numpy as np

from inferplane.runner.uniforms import uniforms

MASK = 2**64 - 1


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def test_the_mixer_is_that_of_splitmix64():
    # the first outputs of the published generator for seed 1234567
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_they_equal_arithmetic_with_python_integers():
    seeds = [0, 1, 2**63, 2**64 - 1, 123456789]
    for position in (0, 1, 7, 100_000):
        got = uniforms(np.array(seeds, np.uint64), np.full(len(seeds), position))
        for seed, value in zip(seeds, got):
            start = mix((seed + 0xD1B54A32D192ED03) & MASK)
            bits = mix((start + (position + 1) * 0x9E3779B97F4A7C15) & MASK)
            assert value == (bits >> 11) / 2**53


def test_a_number_does_not_depend_on_the_others():
    seeds, positions = np.arange(100, dtype=np.uint64), np.arange(100)[::-1].copy()
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(100)]
    assert together.tolist() == alone


def test_they_are_uniform_along_positions_along_seeds_and_in_neighbouring_pairs():
    count = 40_000
    for values in (
        uniforms(np.full(count, 42, np.uint64), np.arange(count)),
        uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.int64)),
    ):
        assert values.min() >= 0
        assert values.max() < 1
        observed = np.histogram(values, 64, (0, 1))[0]
        chi_square = ((observed - count / 64) ** 2 / (count / 64)).sum()
        assert chi_square < 120  # 63 degrees of freedom: exceeded once in 50,000 times
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02
