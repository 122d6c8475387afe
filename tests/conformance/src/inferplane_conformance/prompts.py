"""Prompts of the engine's tests: token ids of the tiny model's vocabulary, the same in every run."""

from __future__ import annotations

import random

from inferplane_conformance.tiny_llama import NUM_SPECIAL, VOCAB_SIZE


def prompt(length: int, seed: int = 0) -> list[int]:
    """Of ordinary tokens."""
    numbers = random.Random(1000 * length + seed)
    return [numbers.randrange(NUM_SPECIAL, VOCAB_SIZE) for _ in range(length)]
