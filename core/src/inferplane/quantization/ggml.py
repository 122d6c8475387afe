"""The block formats of GGUF files: how many values a block holds, in how many bytes, and what they mean.

A row of a weight is a run of blocks; each block carries its own scale. `dequantize` is the reference meaning,
equal bit for bit to ggml's. A kernel that keeps blocks packed needs `BlockFormat` only.

Everything is numpy over bytes, so that reading a file needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferplane.models.errors import ModelLoadError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Blocks are unpacked a few at a time so that the intermediate bytes stay in the cache of one core.
_CHUNK_VALUES = 1 << 19
_K = 256


@dataclass(frozen=True)
class BlockFormat:
    """What a packed weight is. ``unpack(blocks, out)`` writes ``blocks: [n, bytes_per_block]`` uint8 as
    ``out: [n, block_size]`` float32."""

    name: str
    type_id: int
    """The number that GGUF files write."""
    block_size: int
    """Values per block."""
    bytes_per_block: int
    unpack: Callable[[Bytes, Floats], None]

    @property
    def is_packed(self) -> bool:
        """False where a block is one plain number, which needs no dequantization."""
        return self.block_size > 1

    def row_bytes(self, num_values: int) -> int:
        """Bytes of a row. Raises ValueError unless ``num_values`` is a whole number of blocks."""
        num_blocks, rest = divmod(num_values, self.block_size)
        if rest:
            raise ValueError(
                f"a row of {num_values} values is no whole number of {self.name} blocks of {self.block_size}"
            )
        return num_blocks * self.bytes_per_block


def dequantize(data: Bytes, block_format: BlockFormat) -> Floats:
    """Packed rows ``[..., row_bytes]`` uint8 to float32 ``[..., num_values]``."""
    blocks = data.reshape(-1, block_format.bytes_per_block)
    values = np.empty((len(blocks), block_format.block_size), dtype=np.float32)
    step = max(1, _CHUNK_VALUES // block_format.block_size)
    # blocks that hold infinities or not-a-numbers decode to such values, without a warning for each
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            block_format.unpack(blocks[start : start + step], values[start : start + step])
    num_values = data.shape[-1] // block_format.bytes_per_block * block_format.block_size
    return values.reshape(*data.shape[:-1], num_values)


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of each block, ``[n, 1]``."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _unpack_f32(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.copy().view(np.float32)


def _unpack_f16(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.copy().view(np.float16)


def _unpack_bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.copy().view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


def _unpack_q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _nibbles(packed: Bytes, out: NDArray[Any]) -> None:
    """Low halves of 16 bytes are values 0 to 15, high halves values 16 to 31."""
    np.bitwise_and(packed, 15, out=out[:, :16], casting="unsafe")
    np.right_shift(packed, 4, out=out[:, 16:], casting="unsafe")


def _unpack_q4_0(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)


def _unpack_q4_1(blocks: Bytes, out: Floats) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _five_bits(high: Bytes, low: Bytes, out: Floats) -> None:
    """``high: [n, 4]`` holds the fifth bit of each of the 32 values."""
    values = np.unpackbits(high, axis=1, bitorder="little")
    values <<= 4
    nibbles = np.empty_like(values)
    _nibbles(low, nibbles)
    np.bitwise_or(values, nibbles, out=out, casting="unsafe")


def _unpack_q5_0(blocks: Bytes, out: Floats) -> None:
    _five_bits(blocks[:, 2:6], blocks[:, 6:], out)
    out -= 16
    out *= _half(blocks, 0)


def _unpack_q5_1(blocks: Bytes, out: Floats) -> None:
    _five_bits(blocks[:, 4:8], blocks[:, 8:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _scales_and_minimums(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 groups of a K block, each ``[n, 8, 1]``.

    Twelve bytes hold sixteen 6-bit numbers: the first eight bytes the low six bits of groups 0 to 3 and, in
    their top two bits, the high ends of groups 4 to 7, whose low four bits are in the last four bytes.
    """
    scale_low, minimum_low, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([scale_low & 63, (both & 15) | ((scale_low >> 2) & 48)], axis=1)
    minimums = np.concatenate([minimum_low & 63, (both >> 4) | ((minimum_low >> 2) & 48)], axis=1)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * minimums)[:, :, None]


def _unpack_q4_k(blocks: Bytes, out: Floats) -> None:
    groups = out.reshape(-1, 8, 32)
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    np.bitwise_and(packed, 15, out=groups[:, 0::2], casting="unsafe")
    np.right_shift(packed, 4, out=groups[:, 1::2], casting="unsafe")
    scales, minimums = _scales_and_minimums(blocks)
    groups *= scales
    groups -= minimums


def _unpack_q5_k(blocks: Bytes, out: Floats) -> None:
    groups = out.reshape(-1, 8, 32)
    high, packed = blocks[:, 16:48], blocks[:, 48:].reshape(-1, 4, 32)
    # bit g of byte i is the fifth bit of value i of group g
    values = (high[:, None, :] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    values <<= 4
    values[:, 0::2] |= packed & 15
    values[:, 1::2] |= packed >> 4
    groups[...] = values
    scales, minimums = _scales_and_minimums(blocks)
    groups *= scales
    groups -= minimums


def _unpack_q6_k(blocks: Bytes, out: Floats) -> None:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    values = ((high >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]) & 3) << 4
    nibbles = (low >> np.array([0, 4], dtype=np.uint8)[:, None]) & 15
    values |= nibbles.reshape(values.shape)
    scales = blocks[:, 192:208].view(np.int8) * _half(blocks, 208)
    groups = out.reshape(-1, 16, 16)
    groups[...] = values.reshape(groups.shape)
    groups -= 32
    groups *= scales[:, :, None]


FORMATS = {
    block_format.type_id: block_format
    for block_format in (
        BlockFormat("F32", 0, 1, 4, _unpack_f32),
        BlockFormat("F16", 1, 1, 2, _unpack_f16),
        BlockFormat("Q4_0", 2, 32, 18, _unpack_q4_0),
        BlockFormat("Q4_1", 3, 32, 20, _unpack_q4_1),
        BlockFormat("Q5_0", 6, 32, 22, _unpack_q5_0),
        BlockFormat("Q5_1", 7, 32, 24, _unpack_q5_1),
        BlockFormat("Q8_0", 8, 32, 34, _unpack_q8_0),
        BlockFormat("Q4_K", 12, _K, 144, _unpack_q4_k),
        BlockFormat("Q5_K", 13, _K, 176, _unpack_q5_k),
        BlockFormat("Q6_K", 14, _K, 210, _unpack_q6_k),
        BlockFormat("BF16", 30, 1, 2, _unpack_bf16),
    )
}
"""By the number that GGUF files write."""

# Only so that a refusal can name what the file holds.
_NAMES_OF_OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def block_format(type_id: int, tensor: str) -> BlockFormat:
    """The format with this number. Raises `ModelLoadError` naming ``tensor``, the type and those that are known."""
    found = FORMATS.get(type_id)
    if found is None:
        name = _NAMES_OF_OTHERS.get(type_id, "unknown")
        known = ", ".join(known.name for known in FORMATS.values())
        raise ModelLoadError(
            f"tensor {tensor!r} is of type {name} ({type_id}), which cannot be read; known types: {known}"
        )
    return found
