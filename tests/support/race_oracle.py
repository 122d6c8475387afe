"""The race that draws a token, from its definition: Python integers, float64, one token at a time.

Only the uniform number itself is rounded to float32, as its definition says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MASK_64, MASK_32 = 2**64 - 1, 2**32 - 1


def mix_64(x: int) -> int:
    """The output function of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK_64
    return x ^ (x >> 31)


def key_of(seed: int, position: int) -> int:
    start = mix_64((seed + 0xD1B54A32D192ED03) & MASK_64)
    return mix_64((start + (position + 1) * 0x9E3779B97F4A7C15) & MASK_64)


def mix_32(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x21F0AAAD & MASK_32
    x = (x ^ (x >> 15)) * 0xD35A2D97 & MASK_32
    return x ^ (x >> 15)


def exponential(key: int, index: int) -> float:
    bits = mix_32(mix_32(index ^ (key & MASK_32)) ^ (key >> 32))
    uniform = float(np.float32(bits) + np.float32(0.5)) * 2.0**-32
    return -math.log1p(-min(uniform, 1.0 - 2.0**-24))


def arrivals(key: int, weights: Sequence[float], first_index: int) -> list[float]:
    return [
        exponential(key, first_index + offset) / weight if weight > 0 else math.inf
        for offset, weight in enumerate(weights)
    ]


def is_first(key: int, weights: Sequence[float], token: int, block: int, tolerance: float = 1e-4) -> bool:
    """Whether the token's block arrives first and the token first in it, or so near to it that float32 may differ."""
    sums = [sum(weights[start : start + block]) for start in range(0, len(weights), block)]
    of_blocks = arrivals(key, sums, 2**31)
    start = token // block * block
    of_tokens = arrivals(key, weights[start : start + block], start)
    return (
        of_blocks[token // block] <= min(of_blocks) * (1 + tolerance)
        and of_tokens[token - start] <= min(of_tokens) * (1 + tolerance)
        and of_tokens[token - start] < math.inf
    )
