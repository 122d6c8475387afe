"""The op that draws a token from each row of logits, such that a row's token depends on that row alone.

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
from typing import Any

import torch

from inferplane.api.op import declare_op, random_tensor
from inferplane.runner.noise import exponentials

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
class DrawHints:
    """What the host knows of the settings of all rows together."""

    top_k_width: int = 0
    """At least every top_k and at most the vocabulary; 0 when no row has one."""
    has_temperature: bool = True
    """Whether one is not 1; likewise that one of top_p is below 1, and one of min_p above 0."""
    has_top_p: bool = True
    has_min_p: bool = True
    may_wait: bool = False
    """Whether values may decide what is computed, because nothing has to be waited for."""


def _draw_token_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    logits = random_tensor(g, dtype, 6, 1000)
    logits[1] = float("-inf")
    logits[2, 700] = float("nan")
    floats = torch.tensor(
        [[1.0, 0.7, 1.0, 2.0, 0.5, 1.0], [0.9, 1.0, 1.0, 0.5, 1.0, 0.99], [0.0, 0.0, 0.0, 0.0, 0.1, 0.01]]
    )
    keys = torch.randint(-(2**31), 2**31, (2, 6), generator=g, dtype=torch.int32)
    top_k = torch.tensor([[1000, 40, 1000, 1000, 7, 60]], dtype=torch.int32)
    return logits, floats, torch.cat((top_k, keys)), DrawHints(top_k_width=1000)


@declare_op(_draw_token_inputs)
def draw_token(
    logits: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor, hints: DrawHints
) -> torch.Tensor:
    """A token of each row by temperature, then top_k, top_p of what that left, and min_p; equal ones stay together.

    ``logits: [n, vocab_size]``, not changed. ``floats: [3, n]`` float32: temperature above 0, top_p (1 keeps all) and
    min_p (0 keeps all). ``ints: [3, n]`` int32: top_k from 1 to the vocabulary, looked at where the hints have a width,
    and below it the key of the row's random numbers as two halves of 32 bits. Returns ``[2, n]`` int64: the tokens, and
    below each 0; or 0 and below it 1 for a row that leaves nothing to choose: all are negative infinity, or some are
    not numbers.
    """
    temperature, top_p, min_p = floats.float()
    logits = logits.float()
    if hints.has_temperature:
        logits = logits / temperature.unsqueeze(1)
    probs = logits.softmax(1)
    least = probs.amax(1) * min_p if hints.has_min_p else None
    if hints.top_k_width:
        values = probs.topk(hints.top_k_width, dim=1).values
        last_kept = values.gather(1, ints[0].long().unsqueeze(1) - 1).squeeze(1)
        _drop_below(probs, last_kept)
        if hints.has_top_p:
            _drop_below(values, last_kept)
            _drop_below(probs, _end_of_sorted(values, _target(top_p, probs.sum(1)))[0])
    elif hints.has_top_p:
        _drop_below(probs, _end_of_top_p(probs, _target(top_p, 1.0), hints.may_wait))
    if least is not None:
        _drop_below(probs, least)
    return _race(probs, ints[1:])


def _drop_below(probs: torch.Tensor, floor: torch.Tensor) -> None:
    """In place. ``floor: [n]``"""
    probs.mul_(probs >= floor.unsqueeze(1))  # on a CPU twice as fast as masked_fill_


def _target(top_p: torch.Tensor, total: torch.Tensor | float) -> torch.Tensor:
    """[n] int64, the mass that ends each row's set."""
    return torch.where(top_p < 1.0, (top_p * total * MASS_UNIT).long(), NO_END)


def _end_of_top_p(probs: torch.Tensor, target: torch.Tensor, may_wait: bool) -> torch.Tensor:
    """[n], the smallest probability in the set of the largest that reaches each row's target.

    Most rows end among the most likely few hundred tokens, which are several times as cheap to find.
    """
    if not may_wait:
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


def _race(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``probs: [n, vocab_size]`` in any scale of a row's own. A row with some that is not a number has no winner."""
    sums = _by_block(probs)
    blocks = torch.arange(FIRST_BLOCK_INDEX, FIRST_BLOCK_INDEX + sums.shape[1], device=probs.device)
    block = (exponentials(keys, blocks) / sums).argmin(1, keepdim=True)
    index = block * BLOCK + torch.arange(BLOCK, device=probs.device)
    rates = probs.gather(1, index.clamp(max=probs.shape[1] - 1)).masked_fill_(index >= probs.shape[1], 0.0)
    offset = (exponentials(keys, index) / rates).argmin(1, keepdim=True)
    is_wrong = (rates.gather(1, offset).squeeze(1) > 0.0).logical_not()
    token_ids = (block * BLOCK + offset).squeeze(1)
    return torch.stack((token_ids.masked_fill_(is_wrong, 0), is_wrong.long()))


def _by_block(x: torch.Tensor) -> torch.Tensor:
    """Sums over blocks along dimension 1, the last of which may be short: ``[n, num_blocks]``."""
    end = x.shape[1] // BLOCK * BLOCK
    parts = []
    if end:
        parts.append(x[:, :end].unflatten(1, (-1, BLOCK)).sum(2))
    if end < x.shape[1]:
        parts.append(x[:, end:].sum(1, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
