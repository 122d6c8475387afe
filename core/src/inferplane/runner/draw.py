"""Choosing one token of each row of logits, such that a row's token depends on that row alone.

A draw is a race: every token arrives after a time that is exponentially distributed with its probability as the rate,
and the first one wins, which it does with just that probability. A token's time comes from the request's seed, the
position and the token (see `inferplane.runner.noise`), never from its neighbours, so that logits which are off by some
1e-5, as those of another batch shape are, change about as small a share of the winners.

Blocks of tokens race first, each at the rate of its sum, then the tokens of the winning block: the same distribution,
for a few hundred random numbers a row instead of one for each token of the vocabulary.

top_k, top_p (of what top_k left, renormalised) and min_p only take tokens out of the race. Each comes down to the
smallest probability that is kept, and tokens of equal probability are kept or taken out together.

All of it is queued on the logits' device, and nothing here waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from inferplane.runner.noise import exponentials

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime

BLOCK = 256
"""Tokens of the vocabulary that race together."""

FIRST_BLOCK_INDEX = 1 << 31
"""Where the random numbers of blocks begin, beyond those of any token."""

TOP_P_WIDTH = 256
"""Most likely tokens among which the end of a top_p set is looked for first, where looking is free."""

RADIX = ((17, 14), (8, 9), (0, 8))
"""The digits of a probability's bits, the sign apart, as (shift, number of bits). The first, an exponent and six bits
of mantissa, spreads a vocabulary over many bins."""

MASS_UNIT = 2.0**40
"""Probabilities are summed as integers of this unit: in any order, the same sum."""

NO_END = 1 << 62
"""More mass than any row has."""


@dataclass(frozen=True)
class Settings:
    """How to draw from each of n rows, in host memory; all ``[n]`` but the keys."""

    temperature: np.ndarray
    """float32, above 0"""
    top_k: np.ndarray
    """int32, at least 1; looked at only when a width is given"""
    top_p: np.ndarray
    """float32; 1 keeps all."""
    min_p: np.ndarray
    """float32; 0 keeps all."""
    keys: np.ndarray
    """[2, n] int32 of `row_keys`"""

    def to_device(self, runtime: DeviceRuntime) -> tuple[torch.Tensor, torch.Tensor]:
        """Temperature, top_p and min_p as ``[3, n]`` float32, top_k and the keys as ``[3, n]`` int32: one copy."""
        floats = np.stack((self.temperature, self.top_p, self.min_p)).astype(np.float32).view(np.int32)
        packed = np.concatenate((floats, self.top_k[None].astype(np.int32), self.keys))
        on_device = runtime.to_device(torch.from_numpy(packed))
        return on_device[:3].view(torch.float32), on_device[3:]


@dataclass(frozen=True)
class Drawn:
    """On the device."""

    token_ids: torch.Tensor
    """[n] int64"""
    is_valid: torch.Tensor
    """[n] bool. False where the logits left nothing to choose: all negative infinity, or some not a number."""


def draw(logits: torch.Tensor, settings: Settings, top_k_width: int, runtime: DeviceRuntime) -> Drawn:
    """One token of each row by all settings.

    ``logits: [n, vocab_size]`` float32, not changed. ``top_k_width``: at least every top_k and at most the vocabulary,
    or 0 when no row has one.
    """
    (temperature, top_p, min_p), top_k_and_keys = settings.to_device(runtime)
    if (settings.temperature != 1.0).any():
        logits = logits / temperature.unsqueeze(1)
    probs = logits.softmax(1)
    least = probs.amax(1) * min_p if settings.min_p.any() else None
    has_top_p = bool((settings.top_p < 1.0).any())
    if top_k_width:
        values = probs.topk(top_k_width, dim=1).values
        last_kept = values.gather(1, top_k_and_keys[0].long().unsqueeze(1) - 1).squeeze(1)
        _drop_below(probs, last_kept)
        if has_top_p:
            _drop_below(values, last_kept)
            _drop_below(probs, _end_of_sorted(values, _target(top_p, probs.sum(1)))[0])
    elif has_top_p:
        _drop_below(probs, _end_of_top_p(probs, _target(top_p, 1.0), runtime.is_host_memory))
    if least is not None:
        _drop_below(probs, least)
    return _race(probs, top_k_and_keys[1:])


def _drop_below(probs: torch.Tensor, floor: torch.Tensor) -> None:
    """In place. ``floor: [n]``"""
    probs.mul_(probs >= floor.unsqueeze(1))  # on a CPU twice as fast as masked_fill_


def _target(top_p: torch.Tensor, total: torch.Tensor | float) -> torch.Tensor:
    """[n] int64, the mass that ends each row's set."""
    return torch.where(top_p < 1.0, (top_p * total * MASS_UNIT).long(), NO_END)


def _end_of_top_p(probs: torch.Tensor, target: torch.Tensor, may_look: bool) -> torch.Tensor:
    """[n], the smallest probability in the set of the largest that reaches each row's target.

    ``may_look``: whether the values may decide what is computed, because nothing has to be waited for. Most rows end
    among the most likely few hundred tokens, which are several times as cheap to find.
    """
    if not may_look:
        return _end_by_radix(probs, target)
    end, is_reached = _end_of_sorted(probs.topk(min(TOP_P_WIDTH, probs.shape[1]), dim=1).values, target)
    if not is_reached.all():
        rows = torch.where(is_reached.logical_not())[0]
        end[rows] = _end_by_radix(probs[rows], target[rows])
    return end


def _end_of_sorted(values: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``values: [n, m]`` from the largest, the one at which the target is reached, else the last; and whether it is
    reached."""
    mass = (values * MASS_UNIT).long().cumsum(1)
    index = (mass < target.unsqueeze(1)).sum(1, keepdim=True)
    end = values.gather(1, index.clamp(max=values.shape[1] - 1)).squeeze(1)
    return end, index.squeeze(1) < values.shape[1]


def _end_by_radix(probs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The same without sorting: 0 for a row that does not reach its target.

    The bits of a float that is not negative order as an integer does. One digit after the other is fixed, from the
    left: the largest one such that the mass from there upwards still reaches the target.
    """
    bits, mass = probs.view(torch.int32), (probs * MASS_UNIT).long()
    prefix = bits.new_zeros((len(bits), 1))
    left = target.unsqueeze(1)
    for shift, num_bits in RADIX:
        digit = (bits >> shift) & ((1 << num_bits) - 1)
        inside = torch.where(bits >> (shift + num_bits) == prefix, mass, 0)
        of_digit = mass.new_zeros((len(bits), 1 << num_bits)).scatter_add_(1, digit.long(), inside)
        upwards = of_digit.flip(1).cumsum(1).flip(1)
        chosen = ((upwards >= left).sum(1, keepdim=True) - 1).clamp_(min=0)
        left = left - (upwards - of_digit).gather(1, chosen)
        prefix = (prefix << num_bits) | chosen.int()
    return prefix.squeeze(1).view(torch.float32)


def _race(probs: torch.Tensor, keys: torch.Tensor) -> Drawn:
    """``probs: [n, vocab_size]`` in any scale of a row's own. A row with some that is not a number has no winner."""
    sums = _by_block(probs)
    blocks = torch.arange(FIRST_BLOCK_INDEX, FIRST_BLOCK_INDEX + sums.shape[1], device=probs.device)
    block = (exponentials(keys, blocks) / sums).argmin(1, keepdim=True)
    index = block * BLOCK + torch.arange(BLOCK, device=probs.device)
    rates = probs.gather(1, index.clamp(max=probs.shape[1] - 1)).masked_fill_(index >= probs.shape[1], 0.0)
    offset = (exponentials(keys, index) / rates).argmin(1, keepdim=True)
    is_valid = rates.gather(1, offset).squeeze(1) > 0.0
    return Drawn((block * BLOCK + offset).squeeze(1), is_valid)


def _by_block(x: torch.Tensor) -> torch.Tensor:
    """Sums over blocks along dimension 1, the last of which may be short: ``[n, num_blocks]``."""
    end = x.shape[1] // BLOCK * BLOCK
    parts = []
    if end:
        parts.append(x[:, :end].unflatten(1, (-1, BLOCK)).sum(2))
    if end < x.shape[1]:
        parts.append(x[:, end:].sum(1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
