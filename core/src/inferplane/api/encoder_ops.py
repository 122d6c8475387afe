"""The op of encoders: attention over whole sequences, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inferplane.api.op import declare_op, random_tensor


def _encoder_attention_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    lengths = [5, 1, 9]
    q, k, v = (random_tensor(g, dtype, sum(lengths), heads, 16) for heads in (4, 2, 2))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return q, k, v, lengths, starts, 0.25, 3


@declare_op(_encoder_attention_inputs)
def encoder_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    starts: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attention in both directions over sequences that lie one after another (arXiv:1810.04805).

    ``q: [num_tokens, num_heads, head_dim]``, ``k, v: [num_tokens, num_kv_heads, head_dim]`` with num_heads a multiple
    of num_kv_heads; ``lengths`` are the sequences' tokens, on the host, and ``starts: [num_sequences + 1]`` int32 on
    the device is where each begins, with the end of the last. ``scale`` is the factor on q·k. With ``window`` a token
    sees those of its own sequence that are at most so far away, else all of them. Returns a new tensor like q.
    """
    out = torch.empty_like(q)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        queries, keys, values = (x[rows].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if window is None or window >= length else _band(length, window, q.device),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out[rows] = attended[0].transpose(0, 1)
        start += length
    return out


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """``[length, length]``: true where two tokens are at most ``window`` apart."""
    at = torch.arange(length, device=device)
    return (at.unsqueeze(1) - at).abs() <= window
