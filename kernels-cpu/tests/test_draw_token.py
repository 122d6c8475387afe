"""Drawn tokens against the race's definition in float64, with the settings applied in their plainest form."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.draw_token import DTYPES, draw_token
from race_oracle import is_first

pytestmark = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=str(native.unavailable_reason())
)

BLOCK = 256
SLACK = 1e-4
"""Tokens whose place is within it of a boundary may be on either side."""


def weights_of(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities, 0 for what is left out."""
    scaled = np.array(logits, np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    floor = sorted(probs, reverse=True)[min(top_k, len(probs)) - 1]
    kept = np.where(probs >= floor * (1 - 1e-9), probs, 0.0)
    if top_p < 1:
        mass, total = 0.0, kept.sum()
        for value in sorted(kept, reverse=True):
            mass += value
            if mass >= top_p * total:
                kept = np.where(kept >= value * (1 - 1e-9), kept, 0.0)
                break
    return np.where(kept >= min_p * probs.max() * (1 - 1e-9), kept, 0.0)


def drawn(rows: torch.Tensor, settings: list[tuple], keys: torch.Tensor, level: str) -> torch.Tensor:
    """``settings``: temperature, top_k, top_p and min_p of each row."""
    floats = torch.tensor([[row[index] for row in settings] for index in (0, 2, 3)])
    top_k = torch.tensor([[row[1] for row in settings]], dtype=torch.int32)
    return draw_token(rows, floats, torch.cat((top_k, keys)), at=level)


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 5, 16, 255, 256, 700, 5003])
def test_each_draw_is_the_winner_by_definition(level: str, dtype: torch.dtype, vocab_size: int) -> None:
    if level not in native.levels():
        pytest.skip("not on this machine")
    rng = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    settings = [
        (
            rng.choice([0.3, 1.0, 2.5, 40.0]),
            min(vocab_size, rng.choice([1, 3, 50, 10**6, 10**6])),
            rng.choice([0.05, 0.5, 0.9, 0.999, 1.0, 1.0]),
            rng.choice([0.0, 0.0, 0.02, 0.5]),
        )
        for _ in range(16)
    ]
    rows = (torch.randn(16, vocab_size, generator=generator) * 3).to(dtype)
    keys = torch.randint(-(2**31), 2**31, (2, 16), generator=generator, dtype=torch.int32)
    token_ids, is_wrong = drawn(rows, settings, keys, level)
    assert not is_wrong.any()
    num_checked = 0
    for row, chosen, token, low, high in zip(rows.tolist(), settings, token_ids.tolist(), *keys.tolist()):
        temperature, top_k, top_p, min_p = chosen
        loose = weights_of(row, temperature, top_k, min(1.0, top_p + SLACK), max(0.0, min_p - SLACK))
        strict = weights_of(
            row, temperature, top_k, max(0.0, top_p - SLACK) if top_p < 1 else 1.0, min_p + SLACK
        )
        assert loose[token] > 0
        if ((loose > 0) == (strict > 0)).all():
            key = (low & 0xFFFFFFFF) | ((high & 0xFFFFFFFF) << 32)
            assert is_first(key, loose.tolist(), token, BLOCK)
            num_checked += 1
    assert num_checked > 6


@pytest.mark.parametrize("level", native.LEVELS)
def test_boundaries_and_ties(level: str) -> None:
    if level not in native.levels():
        pytest.skip("not on this machine")
    quarters = [math.log(share) for share in (0.25, 0.5, 0.125, 0.125)]
    tied = [1.0, 3.0, 2.0, 2.0, *[2.0] * 12, 0.0]
    generator = torch.Generator().manual_seed(2)
    for logits, chosen, kept in (
        (quarters, (1.0, 4, 0.75, 0.0), {0, 1}),  # 0.5 and 0.25 reach it exactly
        (quarters, (1.0, 4, 1.0, 0.26), {0, 1}),
        (quarters, (1.0, 4, 0.9, 0.0), {0, 1, 2, 3}),
        (tied, (1.0, 2, 1.0, 0.0), set(range(1, 16))),
        (tied, (1.0, 2, 0.1, 0.0), {1}),
        (tied, (1.0, 1, 1.0, 0.0), {1}),
        ([0.0] * 40 + [2.0], (1.0, 41, 0.5, 0.0), set(range(41))),
    ):
        n = 600
        keys = torch.randint(-(2**31), 2**31, (2, n), generator=generator, dtype=torch.int32)
        token_ids, is_wrong = drawn(torch.tensor([logits] * n), [chosen] * n, keys, level)
        assert set(token_ids.tolist()) == kept and not is_wrong.any()


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_with_nothing_to_choose_are_told(level: str, dtype: torch.dtype, bad: float) -> None:
    if level not in native.levels():
        pytest.skip("not on this machine")
    logits = torch.randn(5, 300).to(dtype)
    logits[1] = bad
    logits[2, 299], logits[3, 0] = bad, bad
    keys = torch.zeros(2, 5, dtype=torch.int32)
    is_bad = int(bad != -math.inf)
    for chosen in ((1.0, 300, 1.0, 0.0), (0.7, 5, 0.9, 0.1)):
        token_ids, is_wrong = drawn(logits, [chosen] * 5, keys, level)
        assert is_wrong.tolist() == [0, 1, is_bad, is_bad, 0]
        assert ((token_ids >= 0) & (token_ids < 300)).all()


def test_rows_may_lie_apart_and_top_k_may_be_left_out() -> None:
    whole = torch.randn(3, 900)
    floats, keys = torch.tensor([[1.0] * 3, [0.9] * 3, [0.0] * 3]), torch.tensor([[1, 2, 3], [4, 5, 6]])
    ints = torch.cat((torch.ones(1, 3), keys)).int()
    apart = whole[:, 100:800]
    expected = draw_token(apart.contiguous(), floats, ints, has_top_k=False)
    assert torch.equal(draw_token(apart, floats, ints, has_top_k=False), expected)
    assert torch.equal(draw_token(apart, floats, ints)[0], apart.argmax(1))
