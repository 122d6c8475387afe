"""The race against its definition in float64, and what it draws against transformers' warpers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inferplane.api import draw_op as drawing
from inferplane.api.ops import best_token
from inferplane.runner.draw import Settings, draw
from inferplane.runner.noise import row_keys
from race_oracle import is_first, key_of

NUM_DRAWS = 2000
FEW_DRAWS = 400
"""For what goes by radix, whose bins are many next to these vocabularies."""
SEED = 5


def settings_of(n: int, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, seed: int = SEED) -> Settings:
    def full(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (n,)).copy()

    return Settings(
        full(temperature, np.float32),
        full(top_k, np.int32),
        full(top_p, np.float32),
        full(min_p, np.float32),
        row_keys(np.full(n, seed, np.uint64), np.arange(n)),
    )


def warped(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities that transformers would sample from; top_k 0 keeps all."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, logits[None]) if temperature != 1.0 else logits[None]
    if 0 < top_k < logits.shape[0]:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p > 0.0:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores.double().softmax(-1)[0].numpy()


def check_race(token_ids: torch.Tensor, probs: np.ndarray) -> None:
    """Row i is drawn at position i: each draw is the winner by definition, and all together are as likely as drawn."""
    weights = probs.tolist()
    for position, token in enumerate(token_ids[:200].tolist()):
        assert is_first(key_of(SEED, position), weights, token, drawing.BLOCK)
    counts = np.bincount(token_ids.numpy(), minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    expected = len(token_ids) * probs
    is_rare = expected < 5
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    if (degrees := len(expected) - 1) > 0:
        statistic = ((observed - expected) ** 2 / expected).sum()
        # in standard deviations, by the approximation of Wilson and Hilferty
        share = 2 / (9 * degrees)
        assert ((statistic / degrees) ** (1 / 3) - 1 + share) / share**0.5 < 4.5


@pytest.fixture(autouse=True)
def narrow_paths(monkeypatch: pytest.MonkeyPatch):
    """Blocks and widths small enough that tiny vocabularies have several, short ones included."""
    monkeypatch.setattr(drawing, "BLOCK", 8)
    monkeypatch.setattr(drawing, "TOP_P_WIDTH", 6)


@pytest.fixture(params=["host", "accelerator"])
def any_runtime(request: pytest.FixtureRequest, runtime):
    """Also one whose values may not decide what is computed."""

    class Elsewhere(type(runtime)):
        is_host_memory = False

    return runtime if request.param == "host" else Elsewhere(runtime.descriptor)


@pytest.mark.parametrize("vocab_size", [1, 5, 8, 37, 64])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_plain_and_min_p(runtime, vocab_size: int, temperature: float, min_p: float):
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    drawn = draw(logits.expand(NUM_DRAWS, -1), settings_of(NUM_DRAWS, temperature, min_p=min_p), 0, runtime)
    assert drawn.is_valid.all()
    check_race(drawn.token_ids, warped(logits, temperature, 0, 1.0, min_p))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
@pytest.mark.parametrize("top_k", [1, 4, 20, 36])
def test_top_k_then_top_p_then_min_p(runtime, top_k: int, top_p: float, min_p: float):
    logits = torch.randn(37, generator=torch.Generator().manual_seed(top_k)) * 2
    for width in (top_k, 37):
        chosen = settings_of(NUM_DRAWS, 0.8, top_k, top_p, min_p)
        drawn = draw(logits.expand(NUM_DRAWS, -1), chosen, width, runtime)
        assert drawn.is_valid.all()
        check_race(drawn.token_ids, warped(logits, 0.8, top_k, top_p, min_p))


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.8, 0.95, 0.9999])
@pytest.mark.parametrize("spread", [0.2, 2.0, 8.0])
def test_top_p_within_the_first_candidates_and_beyond(any_runtime, top_p: float, spread: float):
    logits = torch.randn(61, generator=torch.Generator().manual_seed(3)) * spread
    chosen = settings_of(FEW_DRAWS, 0.9, top_p=top_p, min_p=0.02)
    drawn = draw(logits.expand(FEW_DRAWS, -1), chosen, 0, any_runtime)
    assert drawn.is_valid.all()
    check_race(drawn.token_ids, warped(logits, 0.9, 0, top_p, 0.02))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.1, 1.0, 5.0, 40.0]), st.integers(1, 60))
def test_the_end_of_top_p_is_the_same_sorted_and_by_radix(seed: int, spread: float, vocab_size: int):
    generator = torch.Generator().manual_seed(seed)
    probs = (torch.randn(5, vocab_size, generator=generator).mul(spread)).bfloat16().float().softmax(1)
    top_p = torch.tensor([0.001, 0.5, 0.9, 0.99999, 1.0])
    target = drawing._target(top_p, 1.0)
    by_radix = drawing._end_by_radix(probs, target)
    assert torch.equal(drawing._end_of_top_p(probs, target, may_wait=True), by_radix)
    for row, share, end in zip(probs.double().tolist(), top_p.double().tolist(), by_radix.tolist()):
        above = sum(value for value in row if value > end)
        assert above < share + 1e-6
        if end > 0:
            assert end in row
            assert above + sum(value for value in row if value == end) >= share - 1e-6


def test_boundaries_are_those_of_transformers(any_runtime):
    quarters = torch.tensor([0.25, 0.5, 0.125, 0.125]).log()

    def drawn_from(**chosen: float) -> set[int]:
        rows = quarters.expand(FEW_DRAWS, -1)
        return set(draw(rows, settings_of(FEW_DRAWS, **chosen), 0, any_runtime).token_ids.tolist())

    # 0.5 + 0.25 reaches 0.75 exactly, so nothing more is needed
    assert drawn_from(top_p=0.75) == {0, 1} == set(np.flatnonzero(warped(quarters, 1.0, 0, 0.75, 0.0)))
    # a quarter of the best is enough for min_p 0.25
    for min_p, kept in ((0.25, {0, 1, 2, 3}), (0.26, {0, 1})):
        assert drawn_from(min_p=min_p) == kept == set(np.flatnonzero(warped(quarters, 1.0, 0, 1.0, min_p)))


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("width", [4, 17])
def test_tokens_tied_with_the_last_of_top_k_are_kept_however_many(runtime, top_k: int, width: int):
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, *[2.0] * 12, 0.0])
    drawn = draw(logits.expand(NUM_DRAWS, -1), settings_of(NUM_DRAWS, top_k=top_k), width, runtime)
    check_race(drawn.token_ids, warped(logits, 1.0, top_k, 1.0, 0.0))
    # and top_p counts them all: the share of the best is a sixth of what top_k 2 left
    if top_k == 2:
        share = float(warped(logits, 1.0, 2, 1.0, 0.0)[1])
        for top_p, kept in ((share - 0.01, {1}), (share + 0.01, set(range(1, 16)))):
            chosen = settings_of(NUM_DRAWS, top_k=2, top_p=top_p)
            drawn = draw(logits.expand(NUM_DRAWS, -1), chosen, width, runtime)
            assert set(drawn.token_ids.tolist()) == kept


def test_tokens_tied_with_the_last_of_top_p_are_kept(any_runtime):
    logits = torch.tensor([*[0.0] * 40, 2.0])
    drawn = draw(logits.expand(FEW_DRAWS, -1), settings_of(FEW_DRAWS, top_p=0.5), 0, any_runtime)
    assert set(drawn.token_ids.tolist()) == set(range(41))
    drawn = draw(logits.expand(FEW_DRAWS, -1), settings_of(FEW_DRAWS, top_p=0.1), 0, any_runtime)
    assert set(drawn.token_ids.tolist()) == {40}


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_rows_with_nothing_to_choose_are_told_from_their_neighbours(any_runtime, bad: float):
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    if bad == float("-inf"):
        logits[1] = bad
    else:
        logits[1, 17] = bad
    drawers = (
        lambda x: draw(x, settings_of(3), 0, any_runtime),
        lambda x: draw(x, settings_of(3, top_k=5), 8, any_runtime),
        lambda x: draw(x, settings_of(3, top_k=5, top_p=0.9, min_p=0.1), 8, any_runtime),
        lambda x: draw(x, settings_of(3, top_p=0.9), 0, any_runtime),
    )
    for drawer in drawers:
        drawn = drawer(logits)
        assert drawn.is_valid.tolist() == [True, False, True]
        # what is computed from a token before its validity is known needs one of the vocabulary
        assert ((drawn.token_ids >= 0) & (drawn.token_ids < 40)).all()


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
@example(0)
def test_a_banned_token_is_never_drawn(seed: int):
    from inferplane.api import DeviceDescriptor
    from inferplane.reference.platform import HostRuntime

    runtime = HostRuntime(DeviceDescriptor("reference", 0, "host", 1 << 30))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(20, 29, generator=generator) * 15
    banned = torch.rand(20, 29, generator=generator) < 0.9
    banned[torch.arange(20), torch.randint(29, (20,), generator=generator)] = False
    logits[banned] = float("-inf")
    for width, chosen in (
        (0, settings_of(20, 0.3, seed=seed)),
        (8, settings_of(20, 0.3, top_k=5, top_p=0.97, seed=seed)),
        (0, settings_of(20, 0.3, top_p=0.97, seed=seed)),
    ):
        drawn = draw(logits, chosen, width, runtime)
        assert drawn.is_valid.all()
        assert not banned[torch.arange(20), drawn.token_ids].any()


@pytest.mark.parametrize("chosen", [{}, {"top_p": 0.95}, {"top_k": 40}, {"min_p": 0.05}], ids=str)
def test_logits_that_are_a_little_off_change_hardly_a_draw(
    monkeypatch: pytest.MonkeyPatch, runtime, chosen: dict
):
    """By 4e-5 at most, as those of two batch shapes are in float32; at a temperature that makes tokens nearly equal."""
    monkeypatch.undo()
    vocab_size, rows, rounds = 49_152, 20, 5 if "top_p" in chosen else 20
    generator = torch.Generator().manual_seed(11)
    changed = 0
    for seed in range(rounds):
        logits = torch.randn(rows, vocab_size, generator=generator) * 3
        other = logits + (torch.rand(rows, vocab_size, generator=generator) - 0.5) * 8e-5
        made = [
            draw(x, settings_of(rows, 1.5, seed=seed, **chosen), 64 if "top_k" in chosen else 0, runtime)
            for x in (logits, other)
        ]
        changed += int((made[0].token_ids != made[1].token_ids).sum())
    assert changed <= 1  # of 100 or 400


def test_a_draw_does_not_depend_on_its_neighbours(any_runtime):
    vocab_size, rows = 1000, 12
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(2)) * 2
    chosen = settings_of(
        rows, np.linspace(0.5, 2, rows), 1, np.linspace(0.3, 1, rows), np.linspace(0, 0.1, rows)
    )

    def part(of: np.ndarray) -> Settings:
        fields = (chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p)
        return Settings(*(each[of] for each in fields), chosen.keys[:, of])

    together = draw(logits, chosen, 0, any_runtime).token_ids
    order = np.random.default_rng(1).permutation(rows)
    assert torch.equal(draw(logits[order], part(order), 0, any_runtime).token_ids, together[order])
    for start, end in ((0, 1), (3, 5), (5, 12)):
        of = np.arange(start, end)
        assert torch.equal(draw(logits[of], part(of), 0, any_runtime).token_ids, together[of])


def test_nothing_is_read_back_from_an_accelerator(monkeypatch: pytest.MonkeyPatch, runtime):
    """Values that decide in Python are what would wait for the device."""

    class Elsewhere(type(runtime)):
        is_host_memory = False

    def refuse(*_: object) -> None:
        raise AssertionError("a value was read")

    for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    logits = torch.randn(4, 50)
    elsewhere = Elsewhere(runtime.descriptor)
    best_token(logits)
    draw(logits, settings_of(4, 0.7, top_p=0.9, min_p=0.1), 0, elsewhere)
    draw(logits, settings_of(4, 0.7, 5, top_p=0.9), 8, elsewhere)
