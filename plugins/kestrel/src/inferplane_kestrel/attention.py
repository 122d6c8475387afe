"""Paged attention on a card, in its own KV layout."""

from __future__ import annotations

from typing import Any

import torch

from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer, AttentionQuery
from inferplane.api.kv import FullAttentionSpec
from inferplane_kestrel.device import kernel


class KestrelAttention(AttentionBackend):
    """A block lies as ``[2, num_kv_heads, block_size, head_dim]``, so that its keys are moved in one burst."""

    name = "kestrel_paged"

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        layer = query.layer
        if type(layer.spec) is not FullAttentionSpec or layer.soft_cap is not None or layer.has_sinks:
            return f"computes plain full attention only, not {type(layer.spec).__name__}, soft caps or sinks"
        return None

    @classmethod
    def allocate_kv(
        cls, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        shape = (num_blocks, 2, layer.num_kv_heads, layer.spec.block_size, layer.head_dim)
        return torch.empty(shape, dtype=dtype, device=device)

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: torch.Tensor,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        inputs: AttentionInputs = metadata
        _store(k, v, kv, inputs.slot_mapping)
        lens = list(zip(inputs.query_lens_host, inputs.seq_lens_host))
        return _attend(q, kv, inputs.block_table, lens, layer.scale)


@kernel
def _store(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    block_size = kv.shape[3]
    blocks, offsets = slots // block_size, slots % block_size
    kv[blocks, 0, :, offsets] = k
    kv[blocks, 1, :, offsets] = v


@kernel
def _attend(
    q: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, lens: list[tuple[int, int]], scale: float
) -> torch.Tensor:
    """``lens``: of each request how many queries it has, and how many keys."""
    block_size, results = kv.shape[3], []
    for queries, table, (query_len, seq_len) in zip(q.split([n for n, _ in lens]), tables, lens):
        blocks = kv[table[: -(-seq_len // block_size)].long()]
        keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]
        is_visible = torch.ones(query_len, seq_len, dtype=torch.bool).tril(seq_len - query_len)
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries.transpose(0, 1), keys, values, is_visible, scale=scale, enable_gqa=True
        )
        results.append(attended.transpose(0, 1))
    return torch.cat(results)
