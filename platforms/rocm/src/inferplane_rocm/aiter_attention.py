"""AITER (the package `amd-aiter`) for steps in which prompts begin; every other step goes to the Triton kernels."""

from __future__ import annotations

import torch

from inferplane.api.attention import AttentionLayer, AttentionQuery
from inferplane.api.kv import MLAAttentionSpec
from inferplane_rocm.aiter_package import why_no_aiter
from inferplane_rocm.attention import RocmTritonAttention
from inferplane_torch_accelerator.kv_layout import store
from inferplane_torch_accelerator.triton_attention import StepMetadata, window_of

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
"""For which its library has kernels."""


class AiterAttention(RocmTritonAttention):
    """On Instinct GPUs with wavefronts of 64, in half precision, over the keys and values of the step itself."""

    name = "rocm_aiter"
    priority = 20
    quantized_kv = frozenset()

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        layer = query.layer
        if query.dtype not in DTYPES:
            return f"AITER computes in bfloat16 and float16, not in {query.dtype}"
        if not query.device.capabilities.has("wave64"):
            return f"{query.device.name} lacks wave64, which AITER's kernels are written for"
        if layer.head_dim not in HEAD_DIMS:
            return (
                f"AITER has kernels for head sizes {', '.join(map(str, HEAD_DIMS))}, not for {layer.head_dim}"
            )
        is_plain = window_of(layer) is None and not isinstance(layer.spec, MLAAttentionSpec)
        if layer.has_sinks or layer.soft_cap is not None or not is_plain:
            return (
                "AITER is used for plain causal attention only, without windows, latents, soft caps and sinks"
            )
        return why_no_aiter() or super().unsupported_reason(query)

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: torch.Tensor,
        metadata: StepMetadata,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        inputs = metadata.inputs
        if metadata.prompts is None or inputs.query_lens_host != inputs.seq_lens_host:
            return super().forward(layer, q, k, v, kv, metadata, sinks=sinks)
        from aiter import flash_attn_varlen_func

        store(k, v, kv, inputs.slot_mapping)
        longest = max(inputs.seq_lens_host)
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=inputs.query_start,
            cu_seqlens_k=inputs.query_start,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=layer.scale,
            causal=True,
        )
        return out[0] if isinstance(out, tuple) else out
