"""Codes that are packed into 32-bit words."""

from __future__ import annotations

import torch


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """``words: [rows, n]`` int32 to the first ``count`` codes of each row, int32 ``[rows, count]``.

    Codes follow each other without gaps, lowest bits first; where 32 is no multiple of ``bits`` they cross words.
    """
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
        return ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(1)[:, :count]
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    stream = ((words.unsqueeze(-1) >> places) & 1).flatten(1)[:, : count * bits]
    return (stream.unflatten(1, (count, bits)) << places[:bits]).sum(-1, dtype=torch.int32)


def num_words(count: int, bits: int) -> int:
    return -(-count * bits // 32)
