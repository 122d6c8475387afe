"""Each way to draw, over a fine grid of uniform numbers: the whole distribution, against transformers' warpers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inferplane.runner import draw as drawing
from inferplane.runner.draw import Settings, draw, draw_top_k, draw_top_p, take_best

GRID = 2000
GRID_POINTS = (np.arange(GRID) + 0.5) / GRID


def settings_of(n: int, temperature=1.0, top_k=10**6, top_p=1.0, min_p=0.0, uniform=None) -> Settings:
    def full(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (n,)).copy()

    u = GRID_POINTS[:n] if uniform is None else uniform
    return Settings(
        full(temperature, np.float32), full(top_k, np.int64), full(top_p, float), full(min_p, float), u
    )


def warped(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities that transformers would sample from."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, logits[None]) if temperature != 1.0 else logits[None]
    if top_k < logits.shape[0]:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0.0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores.double().softmax(-1)[0].numpy()


def check_distribution(token_ids: np.ndarray, probs: np.ndarray) -> None:
    """Inverting an increasing function on a grid meets every token in proportion, to within one point of the grid."""
    counts = np.bincount(token_ids, minlength=len(probs))
    assert np.abs(counts - probs * GRID).max() <= 1.01
    assert counts[probs == 0].sum() == 0


@pytest.fixture(autouse=True)
def narrow_paths(monkeypatch: pytest.MonkeyPatch):
    """Blocks and widths small enough that tiny vocabularies have several, short ones included."""
    monkeypatch.setattr(drawing, "BLOCK", 8)
    monkeypatch.setattr(drawing, "TOP_P_WIDTH", 6)


@pytest.mark.parametrize("vocab_size", [1, 5, 8, 37, 64])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_plain_and_min_p(runtime, vocab_size: int, temperature: float, min_p: float):
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    drawn = draw(logits.expand(GRID, -1), settings_of(GRID, temperature, min_p=min_p), runtime)
    assert drawn.is_valid.all()
    check_distribution(drawn.token_ids, warped(logits, temperature, vocab_size, 1.0, min_p))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
@pytest.mark.parametrize("top_k", [1, 4, 20, 37])
def test_top_k_then_top_p_then_min_p(runtime, top_k: int, top_p: float, min_p: float):
    logits = torch.randn(37, generator=torch.Generator().manual_seed(top_k)) * 2
    width = min(top_k + 3, 37)
    drawn = draw_top_k(logits.expand(GRID, -1), settings_of(GRID, 0.8, top_k, top_p, min_p), width, runtime)
    assert drawn.is_valid.all()
    check_distribution(drawn.token_ids, warped(logits, 0.8, top_k, top_p, min_p))


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.8, 0.95, 0.9999])
@pytest.mark.parametrize("spread", [0.2, 2.0, 8.0])
def test_top_p_within_the_first_candidates_and_beyond(runtime, top_p: float, spread: float):
    logits = torch.randn(61, generator=torch.Generator().manual_seed(3)) * spread
    drawn = draw_top_p(logits.expand(GRID, -1), settings_of(GRID, 0.9, top_p=top_p, min_p=0.02), runtime)
    assert drawn.is_valid.all()
    check_distribution(drawn.token_ids, warped(logits, 0.9, 61, top_p, 0.02))


def test_boundaries_are_those_of_transformers(runtime):
    quarters = torch.tensor([0.25, 0.5, 0.125, 0.125]).log()
    # 0.5 + 0.25 reaches 0.75 exactly, so nothing more is needed
    drawn = draw_top_p(quarters.expand(GRID, -1), settings_of(GRID, top_p=0.75), runtime)
    assert set(drawn.token_ids) == {0, 1} == set(np.flatnonzero(warped(quarters, 1.0, 4, 0.75, 0.0)))
    # a quarter of the best is enough for min_p 0.25
    for min_p, kept in ((0.25, {0, 1, 2, 3}), (0.26, {0, 1})):
        drawn = draw(quarters.expand(GRID, -1), settings_of(GRID, min_p=min_p), runtime)
        assert set(drawn.token_ids) == kept == set(np.flatnonzero(warped(quarters, 1.0, 4, 1.0, min_p)))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_tokens_tied_with_the_last_of_top_k_are_kept_however_many(runtime, top_k: int):
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, *[2.0] * 12, 0.0])
    for width in (4, 17):
        drawn = draw_top_k(logits.expand(GRID, -1), settings_of(GRID, 1.0, top_k), width, runtime)
        check_distribution(drawn.token_ids, warped(logits, 1.0, top_k, 1.0, 0.0))


def test_equal_tokens_at_the_end_of_top_p_are_kept_in_order_of_their_ids(runtime):
    logits = torch.zeros(40)
    drawn = draw_top_p(logits.expand(GRID, -1), settings_of(GRID, top_p=0.5), runtime)
    assert set(drawn.token_ids) == set(range(20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 7, 8, 37, 64])
def test_the_best_token_is_the_first_of_the_largest(runtime, dtype: torch.dtype, vocab_size: int):
    logits = torch.randint(-3, 3, (50, vocab_size), generator=torch.Generator().manual_seed(1)).to(dtype)
    drawn = take_best(logits, runtime)
    assert drawn.is_valid.all()
    assert drawn.token_ids.tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_rows_with_nothing_to_choose_are_told_from_their_neighbours(runtime, bad: float):
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    if bad == float("-inf"):
        logits[1] = bad
    else:
        logits[1, 17] = bad
    drawers = (
        take_best,
        lambda x, r: draw(x, settings_of(3), r),
        lambda x, r: draw_top_k(x, settings_of(3, top_k=5), 8, r),
        lambda x, r: draw_top_p(x, settings_of(3, top_p=0.9), r),
    )
    for drawer in drawers:
        assert drawer(logits, runtime).is_valid.tolist() == [True, False, True]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.0, 1.0, exclude_max=True))
@example(0, 1.0 - 2**-53)
@example(0, 0.0)
def test_a_banned_token_is_never_drawn(seed: int, uniform: float):
    from inferplane.api import DeviceDescriptor
    from inferplane.reference.platform import HostRuntime

    runtime = HostRuntime(DeviceDescriptor("reference", 0, "host", 1 << 30))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 29, generator=generator) * 5
    banned = torch.rand(1, 29, generator=generator) < 0.7
    banned[0, int(torch.randint(29, (1,), generator=generator))] = False
    logits[banned] = float("-inf")
    given_u = settings_of(1, top_k=5, top_p=0.97, uniform=np.array([uniform]))
    for drawn in (
        draw(logits, given_u, runtime),
        draw_top_k(logits, given_u, 8, runtime),
        draw_top_p(logits, given_u, runtime),
    ):
        assert drawn.is_valid.all()
        assert not banned[0, drawn.token_ids[0]]
