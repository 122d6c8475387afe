"""Rounding a plain matrix to a scheme: each number to the nearest that its block's scale allows.

Blocks of four bits and fewer get the scale that errs least, others that which makes their largest number the largest
code.
"""

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
from inferplane.quantization.scale_search import nearest, search_scales

INT8_CHANNEL = QuantScheme(
    Number.INT, 8, Granularity(1, None), torch.float32,
    activation=Activation.DYNAMIC_TOKEN, activation_number=Number.INT,
)  # fmt: skip
FP8_CHANNEL = QuantScheme(
    Number.FP8_E4M3, 8, Granularity(1, None), torch.float32,
    activation=Activation.DYNAMIC_TOKEN, activation_number=Number.FP8_E4M3,
)  # fmt: skip


INT4_GROUPS = QuantScheme(Number.INT, 4, Granularity(1, 128), torch.bfloat16)
MXFP4 = QuantScheme(Number.FP4, 4, Granularity(1, 32), torch.float8_e8m0fnu)


def round_to(weight: torch.Tensor, scheme: QuantScheme) -> QuantizedWeight:
    """``weight: [out_features, in_features]`` of any float dtype; symmetric schemes with a scale for each row or group.

    A block of zeros has the scale 1.
    """
    granularity = scheme.granularity
    if granularity.rows != 1 or not scheme.is_symmetric or scheme.has_column_order:
        raise ValueError(f"rounding is for symmetric scales of rows and groups, not {scheme}")
    num_rows, num_columns = weight.shape
    size = granularity.columns or num_columns
    padding = -num_columns % size
    blocks = torch.nn.functional.pad(weight.float(), (0, padding)).unflatten(1, (-1, size))
    if scheme.is_packed:
        scale = search_scales(blocks, scheme)
    else:
        largest = blocks.abs().amax(-1)
        scale = torch.where(largest == 0, 1.0, largest / _largest_code(scheme)).to(scheme.scale_dtype)
    scaled = (blocks / scale.float().unsqueeze(-1)).flatten(1)[:, :num_columns]
    return QuantizedWeight(scheme, num_rows, num_columns, codes_of(scaled, scheme), scale)


def with_columns(scheme: QuantScheme, group_size: int | None) -> QuantScheme:
    """The scheme with a scale for so many columns of a row, or for all of them."""
    return replace(scheme, granularity=Granularity(1, group_size))


def _largest_code(scheme: QuantScheme) -> float:
    if scheme.number in FLOAT8:
        return torch.finfo(FLOAT8[scheme.number]).max
    # between the largest and the smallest code, both of which are used
    return 2 ** (scheme.bits - 1) - 0.5


def codes_of(scaled: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """The codes of ``[rows, columns]`` numbers, which are nearest to them, as `QuantizedWeight` has them."""
    if (float8 := FLOAT8.get(scheme.number)) is not None:
        limit = torch.finfo(float8).max
        return scaled.clamp(-limit, limit).to(float8)
    values = nearest(scaled, scheme)
    if scheme.number is Number.INT:
        return pack_nibbles(values + 8) if scheme.is_packed else values.to(torch.int8)
    table, codes = torch.tensor(TABLES[scheme.number], device=scaled.device).sort(stable=True)
    return pack_nibbles(codes[torch.searchsorted(table, values.contiguous())])
