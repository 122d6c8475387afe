"""The reference attention backend: one request at a time, with the formula as it stands in the paper."""

from __future__ import annotations

from typing import Any

import torch

from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer, AttentionQuery
from inferplane.api.kv import (
    QUANTIZED_KV,
    ChunkedLocalSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from inferplane.reference.kv_numbers import indexable, read, row_size, write

_SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalSpec, MLAAttentionSpec)


class ReferenceAttention(AttentionBackend):
    """Scaled dot-product attention (arXiv:1706.03762) with softmax and both products in float32 (float64 for float64).

    Keys and values of a layer lie as ``[2, num_blocks, block_size, num_kv_heads, head_dim]``; of a latent, which is
    both, there is one half only. An int8 row is longer by its scale.
    """

    name = "reference"
    priority = -1000
    quantized_kv = frozenset(QUANTIZED_KV)
    keeps_latent_rows = True

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        if type(query.layer.spec) not in _SPECS:
            known = ", ".join(spec.__name__ for spec in _SPECS)
            return f"computes attention of {known}, not of {type(query.layer.spec).__name__}"
        if query.kv_dtype == torch.int8 and query.layer.head_dim % 4:
            return f"keeps int8 rows of a multiple of 4 numbers, not of {query.layer.head_dim}"
        return None

    @classmethod
    def allocate_kv(
        cls, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        halves = 1 if isinstance(layer.spec, MLAAttentionSpec) else 2
        size = row_size(layer.head_dim, dtype)
        shape = (halves, num_blocks, layer.spec.block_size, layer.num_kv_heads, size)
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
        spec = layer.spec
        k_scales = v_scales = None
        if layer.kv_scales is not None:
            k_scales, v_scales = layer.kv_scales.k, layer.kv_scales.v
        slots = kv.flatten(1, 2)
        write(k, slots[0], inputs.slot_mapping, k_scales)
        if isinstance(spec, MLAAttentionSpec):
            v_scales = k_scales
        else:
            write(v, slots[1], inputs.slot_mapping, v_scales)
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        start = 0
        for index, (query_len, seq_len) in enumerate(zip(inputs.query_lens_host, inputs.seq_lens_host)):
            first_seen = [
                spec.first_visible_token(position) for position in range(seq_len - query_len, seq_len)
            ]
            # what lies before may be gone, and must not be read even to be multiplied by zero
            first_block = first_seen[0] // spec.block_size
            first_token = first_block * spec.block_size
            blocks = inputs.block_table[index, first_block : spec.num_blocks_for(seq_len)].long()
            stored = indexable(kv)[:, blocks].view(kv.dtype).flatten(1, 2)
            stored = stored[:, first_seen[0] - first_token : seq_len - first_token]
            rows = slice(start, start + query_len)
            out[rows] = attend(
                q[rows],
                read(stored[0], k_scales),
                read(stored[-1], v_scales)[..., : v.shape[-1]],
                layer.scale,
                num_hidden=torch.tensor(first_seen, device=q.device) - first_seen[0],
                soft_cap=layer.soft_cap,
                sinks=sinks,
            )
            start += query_len
        return out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    num_hidden: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last queries of a run of tokens over all of it.

    ``q: [query_len, num_heads, head_dim]``, ``k: [num_keys, num_kv_heads, head_dim]`` and
    ``v: [num_keys, num_kv_heads, value_dim]`` with num_heads a multiple of num_kv_heads; query i stands with key
    ``num_keys - query_len + i`` and does not see the first ``num_hidden[i]``
    keys. ``sinks: [num_heads]``. Returns ``[query_len, num_heads, value_dim]`` in q's dtype.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries_per_kv_head = q.shape[1] // k.shape[1]
    keys, values = (x.to(wide).repeat_interleave(queries_per_kv_head, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    key_index = torch.arange(k.shape[0], device=q.device)
    own = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device).unsqueeze(1)
    is_hidden = key_index > own
    if num_hidden is not None:
        is_hidden |= key_index < num_hidden.unsqueeze(1)
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        of_sinks = sinks.to(wide).view(-1, 1, 1).expand(-1, q.shape[0], 1)
        weights = torch.cat([scores, of_sinks], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
