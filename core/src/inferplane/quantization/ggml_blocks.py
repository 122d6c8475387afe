"""What a block of a GGUF file means where each value has a code of its own: all types but IQ1 to IQ3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from inferplane.api.quant import Number
from inferplane.api.quantized_weight import pack_nibbles


@dataclass(frozen=True, eq=False)
class Blocks:
    """Of ``[rows, num_blocks]`` blocks."""

    bits: int
    codes: torch.Tensor
    """``[rows, num_blocks, ...]`` as the field ``codes`` of a `QuantizedWeight`."""
    scale: torch.Tensor
    """``[rows, num_blocks, groups of a block]``"""
    offset: torch.Tensor | None = None
    number: Number = Number.INT
    table: torch.Tensor | None = None
    """float32 [16], of `Number.TABLE4`."""


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of the IQ4 formats."""


def half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte ``start`` of each block, ``[rows, num_blocks, 1]``."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _nibble_pairs(packed: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` bytes whose low halves are n values and whose high halves are the next n, as pairs of neighbours:
    ``[..., n]`` bytes, the even value in the low half."""
    words = packed.contiguous().view(torch.int16)
    low = (words & 0x0F) | ((words >> 4) & 0xF0)
    high = ((words >> 4) & 0x0F) | ((words >> 8) & 0xF0)
    return torch.cat([low.to(torch.uint8), high.to(torch.uint8)], -1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The same values, one a byte: ``[..., 2 n]``."""
    return torch.cat([packed & 15, packed >> 4], -1)


def fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """``[..., n]`` bytes as ``[..., n * 8 / bits]`` numbers, the lowest of each byte first."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> places) & (2**bits - 1)).flatten(-2)


def _centred(values: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 from 0 up to int8 around 0."""
    return values.view(torch.int8) - 2 ** (bits - 1)


def _q4_0(blocks: torch.Tensor) -> Blocks:
    return Blocks(4, _nibble_pairs(blocks[..., 2:]), half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Blocks:
    return Blocks(4, _nibble_pairs(blocks[..., 4:]), half(blocks, 0), half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Blocks:
    values = _nibbles(blocks[..., 6:]) | (fields(blocks[..., 2:6], 1) << 4)
    return Blocks(5, _centred(values, 5), half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Blocks:
    values = _nibbles(blocks[..., 8:]) | (fields(blocks[..., 4:8], 1) << 4)
    return Blocks(5, _centred(values, 5), half(blocks, 0), half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> Blocks:
    return Blocks(8, blocks[..., 2:].contiguous().view(torch.int8), half(blocks, 0))


def _scales_and_offsets(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the 8 groups of a K block, float32, from 6-bit numbers as `inferplane.quantization.ggml` unpacks them."""
    scale_low, minimum_low, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([scale_low & 63, (both & 15) | ((scale_low >> 2) & 48)], -1)
    minimums = torch.cat([minimum_low & 63, (both >> 4) | ((minimum_low >> 2) & 48)], -1)
    return half(blocks, 0).float() * scales, -(half(blocks, 2).float() * minimums)


def _at_shifts(packed: torch.Tensor, *shifts: int) -> torch.Tensor:
    """``[..., n]`` bytes as ``[..., len(shifts), n]``, each moved down by one of the shifts."""
    down = torch.tensor(shifts, dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(-2) >> down.unsqueeze(-1)


def _q2_k(blocks: torch.Tensor) -> Blocks:
    scales, values = blocks[..., :16], _at_shifts(blocks[..., 16:80].unflatten(-1, (2, 32)), 0, 2, 4, 6) & 3
    offset = -(half(blocks, 82).float() * (scales >> 4))
    return Blocks(2, _small_codes(values, 2), half(blocks, 80).float() * (scales & 15), offset)


def _q3_k(blocks: torch.Tensor) -> Blocks:
    low = _at_shifts(blocks[..., 32:96].unflatten(-1, (2, 32)), 0, 2, 4, 6) & 3
    # a bit of each value; value 0 of the codes is 4 where it is set
    high = (_at_shifts(blocks[..., :32], *range(8)) & 1).view(low.shape)
    scale_low = _at_shifts(blocks[..., 96:104], 0, 4).flatten(-2) & 15
    scale_high = _at_shifts(blocks[..., 104:108], 0, 2, 4, 6).flatten(-2) & 3
    scales = (scale_low | (scale_high << 4)).view(torch.int8) - 32
    return Blocks(3, _small_codes(low | (high << 2), 3), half(blocks, 108).float() * scales)


def _small_codes(values: torch.Tensor, bits: int) -> torch.Tensor:
    """``[rows, num_blocks, ...]`` values from 0 up, of fewer than 4 bits, as ``[rows, num_blocks, n / 2]``."""
    values = values.flatten(2)
    return pack_nibbles(values.flatten(0, 1) - 2 ** (bits - 1) + 8).unflatten(0, values.shape[:2])


def _iq4_nl(blocks: torch.Tensor) -> Blocks:
    return _iq4(blocks, _nibble_pairs(blocks[..., 2:]), half(blocks, 0))


def _iq4_xs(blocks: torch.Tensor) -> Blocks:
    scales = (fields(blocks[..., 4:8], 4) | (fields(blocks[..., 2:4], 2) << 4)).view(torch.int8) - 32
    codes = _nibble_pairs(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return _iq4(blocks, codes, half(blocks, 0).float() * scales)


def _iq4(blocks: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> Blocks:
    table = torch.tensor(_IQ4, dtype=torch.float32, device=blocks.device)
    return Blocks(4, codes, scale, number=Number.TABLE4, table=table)


def _mxfp4(blocks: torch.Tensor) -> Blocks:
    scale = blocks[..., :1].contiguous().view(torch.float8_e8m0fnu)
    return Blocks(4, _nibble_pairs(blocks[..., 1:]), scale, number=Number.FP4)


def _nvfp4(blocks: torch.Tensor) -> Blocks:
    # scales have no sign, and ggml takes the one that is not a number for 0
    scale = (blocks[..., :4] & 127).view(torch.float8_e4m3fn).float().nan_to_num(0.0)
    codes = _nibble_pairs(blocks[..., 4:].unflatten(-1, (4, 8))).flatten(-2)
    return Blocks(4, codes, scale, number=Number.FP4)


def _tq1_0(blocks: torch.Tensor) -> Blocks:
    """Five digits of base 3 to a byte, as a fraction of 256 whose first digit is what carries when it is tripled."""
    parts = []
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = torch.tensor([3**place for place in range(digits)], dtype=torch.uint8, device=blocks.device)
        moved = blocks[..., start:stop].unsqueeze(-2) * powers.unsqueeze(-1)
        parts.append(((moved.short() * 3) >> 8).to(torch.uint8).flatten(2))
    return Blocks(2, _small_codes(torch.cat(parts, -1) + 1, 2), half(blocks, 52))


def _tq2_0(blocks: torch.Tensor) -> Blocks:
    values = _at_shifts(blocks[..., :64].unflatten(-1, (2, 32)), 0, 2, 4, 6) & 3
    # 3 stands for 2, which two bits around 0 could not hold
    return Blocks(3, _small_codes(values + 3, 3), half(blocks, 64))


def _q4_k(blocks: torch.Tensor) -> Blocks:
    codes = _nibble_pairs(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return Blocks(4, codes, *_scales_and_offsets(blocks))


def _q5_k(blocks: torch.Tensor) -> Blocks:
    high, packed = blocks[..., 16:48], blocks[..., 48:].unflatten(-1, (4, 32))
    groups = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    # bit g of byte i is the fifth bit of value i of group g
    fifth = (((high.unsqueeze(-2) >> groups.unsqueeze(-1)) & 1) << 4).flatten(-2)
    values = _nibbles(packed).flatten(-2) | fifth
    return Blocks(5, _centred(values, 5), *_scales_and_offsets(blocks))


def _q6_k(blocks: torch.Tensor) -> Blocks:
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8, device=blocks.device)
    top = ((high >> shifts) & 3) << 4
    bottom = torch.cat([low & 15, low >> 4], -2).view(top.shape)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return Blocks(6, _centred((top | bottom).flatten(-3), 6), half(blocks, 208).float() * scales)


READERS: Mapping[str, Callable[[torch.Tensor], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
"""By the type's name."""
