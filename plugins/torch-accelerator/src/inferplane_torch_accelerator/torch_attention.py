"""Attention by torch's own kernels, over the blocks of one request after another."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer, AttentionQuery
from inferplane.api.kv import FullAttentionSpec, MLAAttentionSpec
from inferplane_torch_accelerator.kv_layout import allocate, store


class TorchAttention(AttentionBackend):
    """Full attention and attention to latents, of any head size and dtype that torch has, for layers that no faster
    backend serves. A platform gives it a name."""

    priority = 0
    keeps_latent_rows = True

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        layer = query.layer
        if type(layer.spec) not in (FullAttentionSpec, MLAAttentionSpec):
            return f"computes full attention and attention to latents only, not {type(layer.spec).__name__}"
        if layer.soft_cap is not None or layer.has_sinks:
            return "knows neither soft caps nor sinks"
        return None

    @classmethod
    def allocate_kv(
        cls, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return allocate(layer, num_blocks, dtype, device)

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
        store(k, v, kv, inputs.slot_mapping)
        value_dim = v.shape[-1]
        out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)
        start = 0
        for index, (query_len, seq_len) in enumerate(zip(inputs.query_lens_host, inputs.seq_lens_host)):
            blocks = inputs.block_table[index, : layer.spec.num_blocks_for(seq_len)]
            stored = kv.index_select(1, blocks).flatten(1, 2)[:, :seq_len]
            rows = slice(start, start + query_len)
            out[rows] = _attend(q[rows], stored[0], stored[-1][..., :value_dim], layer.scale)
            start += query_len
        return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The last queries of one sequence over all of it: ``q: [query_len, num_heads, head_dim]``, ``k: [seq_len,
    num_kv_heads, head_dim]`` and ``v: [seq_len, num_kv_heads, value_dim]``; returns ``[query_len, num_heads,
    value_dim]``."""
    query_len, seq_len = q.shape[0], k.shape[0]
    mask = None
    if 1 < query_len < seq_len:
        mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=q.device).tril_(seq_len - query_len)
    out = scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=query_len == seq_len > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)
