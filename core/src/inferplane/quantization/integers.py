"""Whole numbers as checkpoints count them, from 0 up, as `QuantizedWeight` has them, around 0."""

from __future__ import annotations

import torch

from inferplane.api.quantized_weight import pack_nibbles


def centred_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """``codes: [out, in]`` from 0 up, as the field ``codes`` of a `QuantizedWeight`."""
    centred = codes - 2 ** (bits - 1)
    return pack_nibbles(centred + 8) if bits <= 4 else centred.to(torch.int8)


def centred_zero(zero: torch.Tensor, bits: int) -> torch.Tensor:
    return (zero - 2 ** (bits - 1)).to(torch.int8)
