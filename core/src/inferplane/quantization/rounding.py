"""Rounding a plain matrix to a scheme: each number to the nearest that its block's scale allows."""

from __future__ import annotations

from dataclasses import replace

import torch

from inferplane.api.quantized_weight import (
    FLOAT8,
    TABLES,
    Activation,
    Granularity,
    Number,
    QuantizedWeight,
    QuantScheme,
    pack_nibbles,
)

INT8_CHANNEL = QuantScheme(
    Number.INT, 8, Granularity(1, None), torch.float32,
    activation=Activation.DYNAMIC_TOKEN, activation_number=Number.INT,
)  # fmt: skip
FP8_CHANNEL = QuantScheme(
    Number.FP8_E4M3, 8, Granularity(1, None), torch.float32,
    activation=Activation.DYNAMIC_TOKEN, activation_number=Number.FP8_E4M3,
)  # fmt: skip


def round_to(weight: torch.Tensor, scheme: QuantScheme) -> QuantizedWeight:
    """``weight: [out_features, in_features]`` of any float dtype; symmetric schemes with a scale for each row or group.

    The largest number of a block becomes the largest that the codes have. A block of zeros has the scale 1.
    """
    granularity = scheme.granularity
    if granularity.rows != 1 or not scheme.is_symmetric or scheme.has_column_order:
        raise ValueError(f"rounding is for symmetric scales of rows and groups, not {scheme}")
    num_rows, num_columns = weight.shape
    size = granularity.columns or num_columns
    padding = -num_columns % size
    blocks = torch.nn.functional.pad(weight.float(), (0, padding)).unflatten(1, (-1, size))
    largest = blocks.abs().amax(-1)
    scale = largest / _largest_code(scheme)
    if scheme.scale_dtype == torch.float8_e8m0fnu:
        scale = torch.exp2(torch.floor(torch.log2(largest)) - 2)
    scale = torch.where(largest == 0, 1.0, scale).to(scheme.scale_dtype)
    scaled = (blocks / scale.float().unsqueeze(-1)).flatten(1)[:, :num_columns]
    return QuantizedWeight(scheme, num_rows, num_columns, _codes(scaled, scheme), scale)


def with_columns(scheme: QuantScheme, group_size: int | None) -> QuantScheme:
    """The scheme with a scale for so many columns of a row, or for all of them."""
    return replace(scheme, granularity=Granularity(1, group_size))


def _largest_code(scheme: QuantScheme) -> float:
    if scheme.number in FLOAT8:
        return torch.finfo(FLOAT8[scheme.number]).max
    if scheme.number is Number.INT:
        # between the largest and the smallest code, both of which are used
        return 2 ** (scheme.bits - 1) - 0.5
    return max(TABLES[scheme.number])


def _codes(scaled: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    if (float8 := FLOAT8.get(scheme.number)) is not None:
        limit = torch.finfo(float8).max
        return scaled.clamp(-limit, limit).to(float8)
    if scheme.number is Number.INT:
        half = 2 ** (scheme.bits - 1)
        codes = scaled.round().clamp(-half, half - 1)
        return pack_nibbles(codes + 8) if scheme.is_packed else codes.to(torch.int8)
    table = torch.tensor(TABLES[scheme.number], device=scaled.device)
    # ties go to the even code, as IEEE 754 rounds
    ordered, order = table.sort(stable=True)
    above = torch.searchsorted(ordered, scaled.contiguous()).clamp(1, 15)
    low, high = ordered[above - 1], ordered[above]
    below_wins = (scaled - low < high - scaled) | (
        (scaled - low == high - scaled) & (order[above - 1] % 2 == 0)
    )
    return pack_nibbles(order[torch.where(below_wins, above - 1, above)])
