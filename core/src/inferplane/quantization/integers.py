"""Whole numbers as checkpoints count them, from 0 up, as `QuantizedWeight` has them, around 0."""

from __future__ import annotations

import torch

from inferplane.api.quant import StoredMatrix
from inferplane.api.quantized_weight import pack_nibbles


def centred_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """``codes: [out, in]`` from 0 up, as the field ``codes`` of a `QuantizedWeight`."""
    centred = codes - 2 ** (bits - 1)
    return pack_nibbles(centred + 8) if bits <= 4 else centred.to(torch.int8)


_PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ each of its outputs is."""


def check_words(matrix: StoredMatrix) -> None:
    """Raises ValueError naming a matrix whose outputs fill no whole number of words of eight 4-bit codes."""
    if matrix.out_features % 8:
        raise matrix.fail(
            f"out_features {matrix.out_features} fill no whole number of 32-bit words, eight to each"
        )


def in_plain_order(codes: torch.Tensor) -> torch.Tensor:
    """``codes: [n, out]`` whose eights lie as AWQ's kernels want them, 0 2 4 6 1 3 5 7, in their own order."""
    return codes.unflatten(1, (-1, 8))[..., list(_PLACE_OF_OUTPUT)].flatten(1)


def centred_zero(zero: torch.Tensor, bits: int) -> torch.Tensor:
    return (zero - 2 ** (bits - 1)).to(torch.int8)
