"""GGUF files: each tensor of a block format of its own, which becomes whole numbers with scales and offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inferplane.api.quant import (
    Granularity,
    Number,
    QuantConfigError,
    QuantFormat,
    QuantizedWeight,
    QuantScheme,
    StoredMatrix,
    StoredTensor,
)
from inferplane.api.quantized_weight import pack_nibbles
from inferplane.quantization.ggml import FORMATS, TENSOR_TYPES, BlockFormat


class GgufFormat(QuantFormat):
    """``{name}.weight`` as rows of blocks. The configuration is the loader's own and names the format of each."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        known = {each.name: each for each in FORMATS.values() if each.is_packed}
        types = config.get(TENSOR_TYPES)
        if not isinstance(types, Mapping):
            raise QuantConfigError(f"{TENSOR_TYPES} should be a table of types by matrix, but is {types!r}")
        for name, found in types.items():
            if found not in known:
                raise QuantConfigError(
                    f"{TENSOR_TYPES}: {name} is of {found!r}, which is none of {', '.join(known)}"
                )
        self._formats = {name: known[found] for name, found in types.items()}

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        block_format = self._formats.get(name)
        if block_format is None:
            return None
        return _BlockMatrix(name, out_features, in_features, block_format)

    def vocabulary(self, name: str, vocab_size: int, size: int) -> StoredMatrix | None:
        return self.matrix(name, vocab_size, size)


class _BlockMatrix(StoredMatrix):
    def __init__(self, name: str, out_features: int, in_features: int, block_format: BlockFormat) -> None:
        super().__init__(name, out_features, in_features)
        self._format = block_format
        try:
            self._row_bytes = block_format.row_bytes(in_features)
        except ValueError as error:
            raise self.fail(str(error)) from error

    def tensors(self) -> Sequence[StoredTensor]:
        return [StoredTensor("weight", (self.out_features, self._row_bytes), (torch.uint8,))]

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        blocks = tensors["weight"].unflatten(1, (-1, self._format.bytes_per_block))
        parts = _READERS[self._format.name](blocks)
        scale = parts.scale.flatten(1)
        has_offset = parts.offset is not None
        scheme = QuantScheme(
            Number.INT if parts.table is None else Number.TABLE4,
            parts.bits,
            Granularity(1, self.in_features // scale.shape[1]),
            scale.dtype,
            is_symmetric=not has_offset,
            has_offset=has_offset,
        )
        # formats with an offset count from 0, our codes from the middle
        lowest = torch.tensor(-(2 ** (parts.bits - 1)), dtype=torch.int8, device=scale.device)
        return QuantizedWeight(
            scheme,
            self.out_features,
            self.in_features,
            parts.codes.flatten(1),
            scale,
            lowest.expand(scale.shape) if has_offset else None,
            table=parts.table,
            offset=None if parts.offset is None else parts.offset.flatten(1),
        )


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Of ``[rows, num_blocks]`` blocks."""

    bits: int
    codes: torch.Tensor
    """``[rows, num_blocks, ...]`` as the field ``codes`` of a `QuantizedWeight`."""
    scale: torch.Tensor
    """``[rows, num_blocks, groups of a block]``"""
    offset: torch.Tensor | None = None
    table: torch.Tensor | None = None
    """float32 [16], of codes that name one of its numbers."""


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of the IQ4 formats."""


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
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


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """``[..., 4]`` bytes to ``[..., 32]``: 16 where the bit is set."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (((packed.unsqueeze(-1) >> places) & 1) << 4).flatten(-2)


def _centred(values: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 from 0 up to int8 around 0."""
    return values.view(torch.int8) - 2 ** (bits - 1)


def _q4_0(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(4, _nibble_pairs(blocks[..., 2:]), _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(4, _nibble_pairs(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> _Blocks:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _Blocks(5, _centred(values, 5), _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> _Blocks:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _Blocks(5, _centred(values, 5), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(8, blocks[..., 2:].contiguous().view(torch.int8), _half(blocks, 0))


def _scales_and_offsets(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the 8 groups of a K block, float32, from 6-bit numbers as `inferplane.quantization.ggml` unpacks them."""
    scale_low, minimum_low, both = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat([scale_low & 63, (both & 15) | ((scale_low >> 2) & 48)], -1)
    minimums = torch.cat([minimum_low & 63, (both >> 4) | ((minimum_low >> 2) & 48)], -1)
    return _half(blocks, 0).float() * scales, -(_half(blocks, 2).float() * minimums)


def _at_shifts(packed: torch.Tensor, *shifts: int) -> torch.Tensor:
    """``[..., n]`` bytes as ``[..., len(shifts), n]``, each moved down by one of the shifts."""
    down = torch.tensor(shifts, dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(-2) >> down.unsqueeze(-1)


def _q2_k(blocks: torch.Tensor) -> _Blocks:
    scales, values = blocks[..., :16], _at_shifts(blocks[..., 16:80].unflatten(-1, (2, 32)), 0, 2, 4, 6) & 3
    offset = -(_half(blocks, 82).float() * (scales >> 4))
    return _Blocks(2, _small_codes(values, 2), _half(blocks, 80).float() * (scales & 15), offset)


def _q3_k(blocks: torch.Tensor) -> _Blocks:
    low = _at_shifts(blocks[..., 32:96].unflatten(-1, (2, 32)), 0, 2, 4, 6) & 3
    # a bit of each value; value 0 of the codes is 4 where it is set
    high = (_at_shifts(blocks[..., :32], *range(8)) & 1).view(low.shape)
    scale_low = _at_shifts(blocks[..., 96:104], 0, 4).flatten(-2) & 15
    scale_high = _at_shifts(blocks[..., 104:108], 0, 2, 4, 6).flatten(-2) & 3
    scales = (scale_low | (scale_high << 4)).view(torch.int8) - 32
    return _Blocks(3, _small_codes(low | (high << 2), 3), _half(blocks, 108).float() * scales)


def _small_codes(values: torch.Tensor, bits: int) -> torch.Tensor:
    """``[rows, num_blocks, ...]`` values from 0 up, of fewer than 4 bits, as ``[rows, num_blocks, n / 2]``."""
    values = values.flatten(2)
    return pack_nibbles(values.flatten(0, 1) - 2 ** (bits - 1) + 8).unflatten(0, values.shape[:2])


def _iq4_nl(blocks: torch.Tensor) -> _Blocks:
    return _Blocks(4, _nibble_pairs(blocks[..., 2:]), _half(blocks, 0), table=_iq4_table(blocks))


def _iq4_xs(blocks: torch.Tensor) -> _Blocks:
    low = (
        blocks[..., 4:8].unsqueeze(-1) >> torch.tensor([0, 4], dtype=torch.uint8, device=blocks.device)
    ) & 15
    pairs = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., 2:4].unsqueeze(-1) >> pairs) & 3
    scales = (low.flatten(-2) | (high.flatten(-2) << 4)).view(torch.int8) - 32
    codes = _nibble_pairs(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return _Blocks(4, codes, _half(blocks, 0).float() * scales, table=_iq4_table(blocks))


def _iq4_table(like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_IQ4, dtype=torch.float32, device=like.device)


def _q4_k(blocks: torch.Tensor) -> _Blocks:
    codes = _nibble_pairs(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    return _Blocks(4, codes, *_scales_and_offsets(blocks))


def _q5_k(blocks: torch.Tensor) -> _Blocks:
    high, packed = blocks[..., 16:48], blocks[..., 48:].unflatten(-1, (4, 32))
    groups = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    # bit g of byte i is the fifth bit of value i of group g
    fifth = (((high.unsqueeze(-2) >> groups.unsqueeze(-1)) & 1) << 4).flatten(-2)
    values = _nibbles(packed).flatten(-2) | fifth
    return _Blocks(5, _centred(values, 5), *_scales_and_offsets(blocks))


def _q6_k(blocks: torch.Tensor) -> _Blocks:
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8, device=blocks.device)
    top = ((high >> shifts) & 3) << 4
    bottom = torch.cat([low & 15, low >> 4], -2).view(top.shape)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return _Blocks(6, _centred((top | bottom).flatten(-3), 6), _half(blocks, 208).float() * scales)


_READERS: Mapping[str, Callable[[torch.Tensor], _Blocks]] = {
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
}
"""By the format's name; every packed one of `inferplane.quantization.ggml.FORMATS`."""
