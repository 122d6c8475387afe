"""Random numbers that are a function of (seed, position, token) and of nothing else.

A counter-based generator has no state to advance, so a draw does not depend on which requests share the batch, on how
often a request was preempted, or on the rank that draws. The host mixes seed and position into a key for each row; the
device mixes the key with each index that it needs a number for.
"""

from __future__ import annotations

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SEED_TWEAK = np.uint64(0xD1B54A32D192ED03)

_MASK = 0xFFFFFFFF
_FACTORS = (0x21F0AAAD, 0xD35A2D97 - (1 << 32))
"""Odd factors of a 32-bit mixer of low bias. Congruent modulo 2**32 and below 2**31 in size, so that their product with
32 bits never overflows an int64: every device then gets the same bits, with operations that all of them have."""

LARGEST_UNIFORM = 1.0 - 2.0**-24


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One key of 64 bits for each pair, as two halves: ``[2, n]`` int32.

    ``seeds: [n]`` uint64, ``positions: [n]`` integers from 0. It is the ``position``-th output of a SplitMix64 stream
    (Steele, Lea and Flood, OOPSLA 2014) whose start is the mixed seed, so that the streams of neighbouring seeds do not
    overlap.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is what is meant
        start = _mix64(seeds.astype(np.uint64) + _SEED_TWEAK)
        keys = _mix64(start + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return np.stack((keys & np.uint64(_MASK), keys >> np.uint64(32))).astype(np.uint32).view(np.int32)


def exponentials(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Exponentially distributed numbers of mean 1, all above 0 and finite, float32.

    ``keys: [2, n]`` int32 as of `row_keys`; ``index``: int64 from 0 and below 2**32, of a shape that broadcasts with
    ``[n, 1]``. Small numbers, which win races, keep full precision down to 2**-33.
    """
    low, high = (keys.long() & _MASK).unsqueeze(2)
    bits = _mix32(_mix32(index ^ low) ^ high)
    uniform = (bits.float() + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp_(max=LARGEST_UNIFORM))


def _mix64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _mix32(x: torch.Tensor) -> torch.Tensor:
    x = ((x ^ (x >> 16)) * _FACTORS[0]) & _MASK
    x = ((x ^ (x >> 15)) * _FACTORS[1]) & _MASK
    return x ^ (x >> 15)
