"""The scales of small groups of few bits: of some around the largest number, that which errs least."""

from __future__ import annotations

import torch

from inferplane.api.quantized_weight import TABLES, Number, QuantScheme

STEPS = 24
"""Scales that are tried for integers, from half of what the largest number asks for to a little more than all."""
CHUNK_NUMBERS = 1 << 22
"""Of a matrix at a time, so that what is tried takes little memory."""


def search_scales(
    blocks: torch.Tensor, scheme: QuantScheme, importance: torch.Tensor | None = None
) -> torch.Tensor:
    """``blocks: [rows, groups, size]`` float32 to ``[rows, groups]`` of the scheme's scale type.

    Least is the sum of squared errors, each times ``importance: [groups, size]`` of its column. Of MXFP4 three powers
    of two are tried: the usual one, which cuts off what is above 6 of it, and both beside it. A block of zeros has 1.
    """
    rows_at_once = max(1, CHUNK_NUMBERS // blocks[0].numel())
    parts = [_search(part, scheme, importance) for part in blocks.split(rows_at_once)]
    return torch.cat([part.float() for part in parts]).to(scheme.scale_dtype)


def nearest(scaled: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """The numbers of the codes that are nearest: integers, FP4 or NF4. Ties go to the even code, not of NF4."""
    if scheme.number is Number.INT:
        half = 2 ** (scheme.bits - 1)
        return scaled.round().clamp(-half, half - 1)
    if scheme.number is Number.NF4:
        table = torch.tensor(TABLES[Number.NF4], device=scaled.device)
        return table[torch.bucketize(scaled.contiguous(), (table[1:] + table[:-1]) / 2)]
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((scaled / step).round() * step).clamp(-6, 6)


def candidates(largest: torch.Tensor, scheme: QuantScheme) -> list[torch.Tensor]:
    """Scales to try for blocks whose largest number is this, the usual one first."""
    if scheme.number is Number.FP4:
        usual = torch.floor(torch.log2(largest)) - 2
        return [torch.exp2(usual + more) for more in (0, 1, -1)]
    if scheme.number is Number.NF4:
        return [largest]  # as its inventors have it: the largest number is always 1 or -1
    usual = largest / (2 ** (scheme.bits - 1) - 0.5)
    return [usual, *(usual * factor for factor in torch.linspace(0.5, 1.1, STEPS).tolist())]


def _search(blocks: torch.Tensor, scheme: QuantScheme, importance: torch.Tensor | None) -> torch.Tensor:
    largest = blocks.abs().amax(-1)
    best, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for scale in candidates(largest, scheme):
        scale = torch.where(largest == 0, 1.0, scale).to(scheme.scale_dtype).float()
        error = _error(blocks, scale, scheme, importance)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def _error(
    blocks: torch.Tensor, scale: torch.Tensor, scheme: QuantScheme, importance: torch.Tensor | None
) -> torch.Tensor:
    spread = scale.unsqueeze(-1)
    squares = (nearest(blocks / spread, scheme) * spread - blocks).square_()
    return (squares if importance is None else squares * importance).sum(-1)
