"""Random numbers that are a function of (seed, position) and of nothing else.

A counter-based generator has no state to advance, so a draw does not depend on which requests share the batch, on
how often a request was preempted, or on the rank that draws.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SEED_TWEAK = np.uint64(0xD1B54A32D192ED03)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) with 53 random bits for each pair.

    ``seeds: [n]`` uint64, ``positions: [n]`` integers from 0. It is the ``position``-th output of a SplitMix64 stream
    (Steele, Lea and Flood, OOPSLA 2014) whose start is the mixed seed, so that the streams of neighbouring seeds do not
    overlap.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is what is meant
        start = _mix(seeds.astype(np.uint64) + _SEED_TWEAK)
        bits = _mix(start + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
