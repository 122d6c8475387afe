"""Keys and values to the numbers of a cache and back.

A row is one key or value of one head. fp8 rows are divided by their head's scale; a row of int8 has a scale of its own,
which makes its largest number 127 and lies behind the numbers as a float32.
"""

from __future__ import annotations

import torch

_SCALE_BYTES = 4


def row_size(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a row takes in the cache."""
    return head_dim + _SCALE_BYTES if dtype == torch.int8 else head_dim


def write(
    x: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, scales: torch.Tensor | None
) -> None:
    """``x: [num_tokens, num_kv_heads, head_dim]`` to slots of ``cache: [num_slots, num_kv_heads, row_size]``;
    ``scales: [num_kv_heads]`` of fp8. What is beyond the range of fp8 becomes its largest number."""
    if cache.dtype == torch.int8:
        cache[slot_mapping] = _int8_rows(x)
    elif scales is None:
        cache[slot_mapping] = x.to(cache.dtype)
    else:
        limit = torch.finfo(cache.dtype).max
        numbers = (x.float() / scales.unsqueeze(1)).clamp(-limit, limit).to(cache.dtype)
        indexable(cache)[slot_mapping] = indexable(numbers)


def read(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """``[num_tokens, num_kv_heads, row_size]`` as ``[num_tokens, num_kv_heads, head_dim]``: float32 where quantized."""
    if rows.dtype == torch.int8:
        scale = rows[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
        return rows[..., :-_SCALE_BYTES].float() * scale
    return rows if scales is None else rows.float() * scales.unsqueeze(1)


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; not every device's indexing knows 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _int8_rows(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / 127)
    numbers = (wide / scale).round().to(torch.int8)
    return torch.cat([numbers, scale.view(torch.int8)], -1)
