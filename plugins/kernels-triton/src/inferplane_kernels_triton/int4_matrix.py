"""A weight of 4-bit codes, whole numbers or E2M1, as the kernels here read it.

A row lies in blocks of 128 columns, each 16 words of 32 bits: word ``j`` holds columns ``j``, ``j + 16`` … ``j + 112``
of its block at its places 0 to 7. One code of each of 16 neighbouring words is then 16 neighbouring columns, which meet
16 neighbouring numbers of x, and no group's border runs through them. Places 0 to 3 are the low halves of a word's
bytes from the lowest byte up, and places 4 to 7 the high ones, so that one mask makes bytes of half a block's codes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.launch import require_unit_stride

BLOCK = 128
"""Columns of a block."""
WORDS = 16
"""Words of a block, and neighbouring columns that its words hold at one place."""
PLACES = 8
"""Codes in a word."""
CODE_OF_ZERO = 8
"""Of whole numbers; of E2M1 it is 0."""
_ROWS_AT_ONCE = 1 << 12


@triton.jit
def codes_at(words, PLACE: tl.constexpr):
    """The codes, 0 to 15, that uint32 ``words`` hold at one place."""
    return (words >> (8 * (PLACE % 4) + 4 * (PLACE // 4))) & 15


@triton.jit
def e2m1_at(words, PLACE: tl.constexpr, NUMBER: tl.constexpr):
    """The numbers of type NUMBER that the codes of uint32 ``words`` at one place are, as E2M1.

    A code's exponent and mantissa are put where those of NUMBER meet: that is the number itself, 0.5 included, which is
    none of full precision there, but for the difference of the two types' biases.
    """
    code = codes_at(words, PLACE)
    if NUMBER == tl.float32:  # noqa: SIM300 - the compiler compares types in this order
        number = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 2.0**126
    elif NUMBER == tl.float16:  # noqa: SIM300
        bits = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.uint16)
        number = bits.to(tl.float16, bitcast=True) * 2.0**14
    else:
        bits = (((code & 8) << 12) | ((code & 7) << 6)).to(tl.uint16)
        number = bits.to(tl.bfloat16, bitcast=True) * 2.0**126
    return number


@triton.jit
def load_scales(ptr, at, mask):
    """As float32; those of a byte are exponents of powers of two, with a bias of 127, and never 255."""
    if ptr.dtype.element_ty == tl.uint8:
        exponent = tl.load(ptr + at, mask=mask, other=0).to(tl.int32)
        return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    else:
        return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


def unsupported_group(group: int | None) -> str | None:
    """Why no matrix has groups of so many columns; None for a whole row is one that it has."""
    if group is None or group % BLOCK == 0 or group in (16, 32, 64):
        return None
    return f"groups should be of 16, 32, 64 or a multiple of {BLOCK} columns, not {group}"


@dataclass(frozen=True)
class Int4Matrix:
    """``[out_features, in_features]`` of ``(code - 8 - zero) * scale + offset``, or with ``is_e2m1`` of ``number *
    scale``."""

    words: torch.Tensor
    """int32 ``[out_features, 16 * blocks]``; columns beyond the last are the code of zero."""
    scale: torch.Tensor
    """``[out_features, groups]`` of any floating dtype; uint8 holds exponents of powers of two, with a bias of 127."""
    zero: torch.Tensor | None
    """Of the scale's shape, int8 or floating."""
    offset: torch.Tensor | None
    """Of the scale's shape."""
    in_features: int
    group: int
    """Columns of one scale: 16, 32, 64 or a multiple of 128."""
    is_e2m1: bool = False

    @classmethod
    def pack(
        cls,
        codes: torch.Tensor,
        scale: torch.Tensor,
        in_features: int,
        group: int | None,
        zero: torch.Tensor | None = None,
        offset: torch.Tensor | None = None,
        *,
        is_e2m1: bool = False,
    ) -> Int4Matrix:
        """``codes``: uint8 ``[out_features, ceil(in_features / 2)]``, the even column's in the low half of a byte.

        Raises ValueError for a group that `unsupported_group` names, scales that are not one for each group, or E2M1
        with zero points or offsets.
        """
        if is_e2m1 and (zero is not None or offset is not None):
            raise ValueError("weights of E2M1 have no zero points and no offsets")
        if scale.dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.uint8)
        if reason := unsupported_group(group):
            raise ValueError(reason)
        num_blocks = -(-in_features // BLOCK)
        size = group or num_blocks * BLOCK
        want = (len(codes), -(-in_features // size))
        given: dict[str, torch.Tensor | None] = {"scale": scale, "zero": zero, "offset": offset}
        for name, tensor in given.items():
            if tensor is not None and tensor.shape != want:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, needs {want}")
        words = codes.new_empty((len(codes), num_blocks * WORDS), dtype=torch.int32)
        for some, target in zip(codes.split(_ROWS_AT_ONCE), words.split(_ROWS_AT_ONCE)):
            target.copy_(_words(some, in_features, num_blocks, 0 if is_e2m1 else CODE_OF_ZERO))
        parts = [None if each is None else each.contiguous() for each in (scale, zero, offset)]
        return cls(words, parts[0], parts[1], parts[2], in_features, size, is_e2m1)

    @property
    def out_features(self) -> int:
        return len(self.words)

    def check(self, x: torch.Tensor) -> None:
        """Raises ValueError where ``x: [num_tokens, in_features]`` has other columns, or they are not contiguous."""
        require_unit_stride(x=x)
        if x.shape[1] != self.in_features:
            raise ValueError(f"x has {x.shape[1]} columns, needs {self.in_features}")


def _words(codes: torch.Tensor, in_features: int, num_blocks: int, filling: int) -> torch.Tensor:
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1)[:, :in_features]
    nibbles = torch.nn.functional.pad(nibbles, (0, num_blocks * BLOCK - in_features), value=filling)
    nibbles = nibbles.view(len(codes), num_blocks, PLACES, WORDS)
    words = nibbles.new_zeros((len(codes), num_blocks, WORDS), dtype=torch.int32)
    for place in range(PLACES):
        words |= nibbles[:, :, place].int() << (8 * (place % 4) + 4 * (place // 4))
    return words.flatten(1)
