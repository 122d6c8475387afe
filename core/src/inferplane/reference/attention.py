"""The reference attention backend: one request at a time, with the formula as it stands in the paper."""

from __future__ import annotations

from typing import Any

import torch

from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer
from inferplane.api.kv import FullAttentionSpec


class ReferenceAttention(AttentionBackend):
    """Scaled dot-product attention (arXiv:1706.03762) with softmax and both products in float32 (float64 for float64).

    Keys and values of a layer lie as ``[2, num_blocks, block_size, num_kv_heads, head_dim]``.
    """

    name = "reference"
    priority = -1000

    @classmethod
    def unsupported_reason(cls, layer: AttentionLayer, dtype: str) -> str | None:
        if type(layer.spec) is not FullAttentionSpec:
            return f"computes full attention only, not {type(layer.spec).__name__}"
        return None

    @classmethod
    def allocate_kv(
        cls, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        shape = (2, num_blocks, layer.spec.block_size, layer.num_kv_heads, layer.head_dim)
        return torch.empty(shape, dtype=dtype, device=device)

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        inputs: AttentionInputs = metadata
        kv.flatten(1, 2)[0, inputs.slot_mapping] = k
        kv.flatten(1, 2)[1, inputs.slot_mapping] = v
        out = torch.empty_like(q)
        start = 0
        for index, (query_len, seq_len) in enumerate(zip(inputs.query_lens_host, inputs.seq_lens_host)):
            blocks = inputs.block_table[index, : layer.spec.num_blocks_for(seq_len)].long()
            keys, values = kv[:, blocks].flatten(1, 2)[:, :seq_len]
            rows = slice(start, start + query_len)
            out[rows] = attend(q[rows], keys, values, layer.scale)
            start += query_len
        return out


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last queries of one sequence over all of it.

    ``q: [query_len, num_heads, head_dim]``, ``k, v: [seq_len, num_kv_heads, head_dim]`` with num_heads a multiple of
    num_kv_heads; query i stands at position ``seq_len - query_len + i``. Returns q's shape and dtype.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries_per_kv_head = q.shape[1] // k.shape[1]
    keys, values = (x.to(wide).repeat_interleave(queries_per_kv_head, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), keys) * scale
    query_positions = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)
    is_future = torch.arange(k.shape[0], device=q.device) > query_positions.unsqueeze(1)
    weights = scores.masked_fill(is_future, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
