"""FlashAttention-4 (the package `flash-attn-4`) for steps with prompts; single tokens go to the Triton kernel."""

from __future__ import annotations

import importlib.util

import torch

from inferplane.api.attention import AttentionLayer, AttentionQuery
from inferplane_cuda.attention import CudaTritonAttention
from inferplane_torch_accelerator.triton_attention import StepMetadata, window_of

DTYPES = (torch.bfloat16, torch.float16)


class FlashAttention(CudaTritonAttention):
    """On GPUs with the bulk copy engine, in half precision. It compiles itself at the first step of each kind."""

    name = "cuda_flash"
    priority = 20

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        if query.dtype not in DTYPES:
            return f"FlashAttention computes in bfloat16 and float16, not in {query.dtype}"
        if not query.device.capabilities.has("bulk_tensor_copy"):
            return f"{query.device.name} lacks bulk_tensor_copy, which FlashAttention-4 is used with"
        if query.layer.head_dim % 8:
            return f"FlashAttention needs head sizes that are multiples of 8, not {query.layer.head_dim}"
        if not _is_installed():
            return "the package flash-attn-4 is not installed"
        return super().unsupported_reason(query)

    def _prefill(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        kv: torch.Tensor,
        metadata: StepMetadata,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        from flash_attn.cute import flash_attn_varlen_func

        inputs, window = metadata.inputs, window_of(layer)
        out = flash_attn_varlen_func(
            q,
            kv[0],
            kv[1],
            cu_seqlens_q=inputs.query_start,
            max_seqlen_q=max(inputs.query_lens_host),
            max_seqlen_k=metadata.longest,
            seqused_k=inputs.seq_lens,
            page_table=inputs.block_table,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
            learnable_sink=sinks,
            softcap=layer.soft_cap or 0.0,
        )
        return out[0] if isinstance(out, tuple) else out


def _is_installed() -> bool:
    """Older FlashAttention packages have the same name and not this part."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:  # no such package, or one that does not load here
        return False
