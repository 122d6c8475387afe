"""Choosing one token of each row of logits, such that a row's token depends on that row alone.

The passes over the vocabulary run on the device: a maximum, a softmax, a partial sort. What they leave, a few hundred
numbers a row, is finished on the host in float64. Every row takes the path that its own settings name, and each step
of a path treats rows separately, so that a row gets the same token alone and in any batch.

With filters the order is temperature, top_k, top_p (of what top_k left, renormalised), min_p. A token tied with the
last one that top_k keeps is kept too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime

BLOCK = 256
"""Tokens of the vocabulary that are summed, or searched for the maximum, together."""

TOP_P_WIDTH = 256
"""Most likely tokens among which the end of a top_p set is looked for first."""


@dataclass(frozen=True)
class Settings:
    """How to draw from each of n rows; all ``[n]``."""

    temperature: np.ndarray
    """float32, above 0"""
    top_k: np.ndarray
    """int64; the vocabulary's size or more keeps all."""
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray
    """float64 in [0, 1): the place in the cumulative distribution."""

    def __getitem__(self, rows: np.ndarray | slice) -> Settings:
        return Settings(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )


@dataclass(frozen=True)
class Drawn:
    token_ids: np.ndarray
    """[n] int64"""
    is_valid: np.ndarray
    """[n] bool. False where the logits left nothing to choose: all negative infinity, or some not a number."""

    def replace(self, row: int, other: Drawn) -> None:
        """Puts the only row of another in place of one of these."""
        self.token_ids[row], self.is_valid[row] = other.token_ids[0], other.is_valid[0]


def take_best(logits: torch.Tensor, runtime: DeviceRuntime) -> Drawn:
    """The most likely token of each row, the first of several. ``logits: [n, vocab_size]``, any float dtype."""
    # A maximum of blocks and then within one block: several times as fast as argmax, which carries indices along.
    block = _by_block(logits, torch.amax).argmax(1)
    best, offset = _take_block(logits, block, float("-inf")).max(1)
    return Drawn(runtime.to_host(block * BLOCK + offset).numpy(), runtime.to_host(best.isfinite()).numpy())


def draw(logits: torch.Tensor, settings: Settings, runtime: DeviceRuntime) -> Drawn:
    """One token of each row by its temperature and min_p; top_k and top_p are not looked at.

    ``logits: [n, vocab_size]`` float32.
    """
    probs = _probabilities(logits, settings, runtime)
    if settings.min_p.any():
        floor = probs.amax(1) * _to_device(settings.min_p.astype(np.float32), runtime)
        probs.masked_fill_(probs < floor.unsqueeze(1), 0.0)
    sums = _to_host(_by_block(probs, torch.sum), runtime)
    total = sums.sum(1)
    block, rest = _invert(sums, settings.uniform * total)
    in_block = _take_block(probs, _to_device(block, runtime), 0.0)
    offset, _ = _invert(_to_host(in_block, runtime), rest)
    return Drawn(block * BLOCK + offset, np.isfinite(total) & (total > 0))


def draw_top_k(logits: torch.Tensor, settings: Settings, width: int, runtime: DeviceRuntime) -> Drawn:
    """One token of each row by all settings. Every top_k is at most ``width``, and that at most the vocabulary."""
    values, token_ids = _most_likely(logits, width, runtime)
    last_kept = np.take_along_axis(values, settings.top_k[:, None] - 1, 1)
    drawn = _draw_top_k(values, last_kept, token_ids, settings)
    if width < logits.shape[1]:
        # tokens tied with the last one kept may go on beyond the width
        is_cut = (values[:, -1:] == last_kept) & np.isfinite(last_kept)
        for row, values, ids in _at_least(logits, np.flatnonzero(is_cut), last_kept[:, 0], runtime):
            values, token_ids = _sorted(values, ids)
            drawn.replace(row, _draw_top_k(values, last_kept[row], token_ids, settings[row : row + 1]))
    return drawn


def _draw_top_k(
    values: np.ndarray, last_kept: np.ndarray, token_ids: np.ndarray, settings: Settings
) -> Drawn:
    with np.errstate(invalid="ignore"):  # a row of negative infinity alone is reported as not valid
        weights = np.exp((values - values[:, :1]) / settings.temperature[:, None].astype(np.float64))
    weights[values < last_kept] = 0.0
    return _draw_sorted(weights, weights.sum(1), token_ids, settings)


def draw_top_p(logits: torch.Tensor, settings: Settings, runtime: DeviceRuntime) -> Drawn:
    """One token of each row by all settings but top_k."""
    probs = _probabilities(logits, settings, runtime)
    vocab_size = probs.shape[1]
    width = min(TOP_P_WIDTH, vocab_size)
    weights, token_ids = _most_likely(probs, width, runtime)
    is_cut = weights.sum(1) < settings.top_p
    drawn = _draw_sorted(weights, np.ones(len(weights)), token_ids, settings)
    if width < vocab_size:
        # All tokens below (1 - top_p) / vocab_size together are less than 1 - top_p, so top_p is reached without any of
        # them; the half allows for rounding.
        floor = 0.5 * (1.0 - settings.top_p) / vocab_size
        for row, values, ids in _at_least(probs, np.flatnonzero(is_cut), floor, runtime):
            kept = _coarse_top(values, settings.top_p[row])
            weights, token_ids = _sorted(values[kept], ids[kept])
            drawn.replace(row, _draw_sorted(weights, np.ones(1), token_ids, settings[row : row + 1]))
    return drawn


def _coarse_top(probs: np.ndarray, mass: float) -> np.ndarray:
    """Of ``probs: [m]`` a mask of the largest that reach the mass, and of some more.

    Sorting them all would take ten times as long as this histogram: a bin is an exponent and six bits of mantissa.
    """
    bins = probs.astype(np.float32).view(np.int32) >> 17
    bins -= bins.min()
    running = np.cumsum(np.bincount(bins, weights=probs)[::-1])
    return bins >= len(running) - 1 - np.searchsorted(running, mass * (1.0 + 1e-9))


def _draw_sorted(weights: np.ndarray, total: np.ndarray, token_ids: np.ndarray, settings: Settings) -> Drawn:
    """Applies top_p and min_p to weights sorted from the largest, which are shares of ``total``, and draws."""
    before = np.zeros_like(weights)
    np.cumsum(weights[:, :-1], 1, out=before[:, 1:])
    top_p = settings.top_p[:, None]
    weights[(before >= top_p * total[:, None]) & (top_p < 1.0)] = 0.0
    weights[weights < settings.min_p[:, None] * weights[:, :1]] = 0.0
    sums = weights.sum(1)
    index, _ = _invert(weights, settings.uniform * sums)
    chosen = np.take_along_axis(token_ids, index[:, None], 1)[:, 0]
    return Drawn(chosen, np.isfinite(sums) & (sums > 0))


def _probabilities(logits: torch.Tensor, settings: Settings, runtime: DeviceRuntime) -> torch.Tensor:
    if (settings.temperature != 1.0).any():
        logits = logits / _to_device(settings.temperature, runtime).unsqueeze(1)
    return logits.softmax(1)


def _most_likely(x: torch.Tensor, width: int, runtime: DeviceRuntime) -> tuple[np.ndarray, np.ndarray]:
    """The ``width`` largest of each row as float64, and their indices; equal ones in order of their index."""
    if width == x.shape[1]:
        values, indices = x.sort(dim=1, descending=True, stable=True)
        return _to_host(values, runtime), runtime.to_host(indices).numpy()
    values, indices = x.topk(width, dim=1)
    ordered, ids = _to_host(values, runtime), runtime.to_host(indices).numpy()
    has_ties = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if has_ties.any():  # topk leaves the order among equals open
        by_id = np.sort(ids[has_ties], 1)
        found = np.argsort(ids[has_ties], 1)
        by_value = np.argsort(-np.take_along_axis(ordered[has_ties], found, 1), 1, kind="stable")
        ids[has_ties] = np.take_along_axis(by_id, by_value, 1)
    return ordered, ids


def _at_least(
    x: torch.Tensor, rows: np.ndarray, floor: np.ndarray, runtime: DeviceRuntime
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For each of the rows all its values that are not below its floor, as float64, and their indices, ascending."""
    if not len(rows):
        return
    width = x.shape[1]
    part = x[_to_device(rows, runtime)]
    is_in = part >= _to_device(floor[rows].astype(np.float32), runtime).unsqueeze(1)
    flat = np.flatnonzero(runtime.to_host(is_in).numpy())
    values = _to_host(part.view(-1)[_to_device(flat, runtime)], runtime)
    ends = np.searchsorted(flat, np.arange(1, len(rows) + 1) * width)
    for index, (row, start, end) in enumerate(zip(rows.tolist(), [0, *ends[:-1]], ends)):
        yield row, values[start:end], flat[start:end] - index * width


def _sorted(values: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One row in the form of `_most_likely`."""
    order = np.argsort(-values, kind="stable")
    return values[None, order], ids[None, order]


def _invert(weights: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first index whose running sum is above the target, never one of weight 0, and what the target has left there.

    ``weights: [n, m]`` float64, ``target: [n]``, not below 0.
    """
    running = np.cumsum(weights, 1)
    index = (running <= target[:, None]).sum(1)
    # Rounding can put a target at or past the end of its sum; then it means the last that can be drawn.
    last = weights.shape[1] - 1 - (weights[:, ::-1] > 0).argmax(1)
    index = np.minimum(index, last)
    rows = np.arange(len(weights))
    return index, target - (running[rows, index] - weights[rows, index])


def _by_block(x: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """``[n, vocab_size] -> [n, num_blocks]``; the last block may be short."""
    end = x.shape[1] // BLOCK * BLOCK
    parts = []
    if end:
        parts.append(reduce(x[:, :end].unflatten(1, (-1, BLOCK)), 2))
    if end < x.shape[1]:
        parts.append(reduce(x[:, end:].unsqueeze(1), 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _take_block(x: torch.Tensor, block: torch.Tensor, fill: float) -> torch.Tensor:
    """Block ``block[i]`` of row i as ``[n, BLOCK]``, a short one filled up with ``fill``."""
    index = block.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=x.device)
    values = x.gather(1, index.clamp(max=x.shape[1] - 1))
    return values.masked_fill_(index >= x.shape[1], fill) if x.shape[1] % BLOCK else values


def _to_host(x: torch.Tensor, runtime: DeviceRuntime) -> np.ndarray:
    return runtime.to_host(x).numpy().astype(np.float64)


def _to_device(x: np.ndarray, runtime: DeviceRuntime) -> torch.Tensor:
    return runtime.to_device(torch.from_numpy(x))
