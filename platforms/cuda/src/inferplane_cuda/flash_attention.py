"""FlashAttention-4 (the package `flash-attn-4`) for prompts; single tokens of the same step go to the Triton kernel."""

from __future__ import annotations

import torch

from inferplane.api.attention import AttentionLayer, AttentionQuery
from inferplane.api.kv import MLAAttentionSpec
from inferplane_cuda import flash_library
from inferplane_cuda.attention import CudaTritonAttention
from inferplane_cuda.flash_library import (
    CAPABILITY,
    MAX_REQUESTS,
    ONE_KERNEL_TOKENS,
    Variant,
    missing_package,
)
from inferplane_torch_accelerator.triton_attention import StepPart, window_of

DTYPES = (torch.bfloat16, torch.float16)


class FlashAttention(CudaTritonAttention):
    """On GPUs with the bulk copy engine, in half precision. The library compiles itself while weights are loaded.

    Packages that are there and cannot be imported are found out about when the worker runs its first step; then the
    Triton kernel takes their place, and the log says why. It also has the steps with more than 256 prompts, which are
    short then.

    Requests are where ``cu_seqlens_q`` says, which need not begin with row 0: those before, of a single token each,
    are left to the kernel that splits their sequences.
    """

    name = "cuda_flash"
    priority = 20
    quantized_kv = frozenset()

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        if query.dtype not in DTYPES:
            return f"FlashAttention computes in bfloat16 and float16, not in {query.dtype}"
        if not query.device.capabilities.has(CAPABILITY):
            return f"{query.device.name} lacks {CAPABILITY}, which FlashAttention-4 is used with"
        if isinstance(query.layer.spec, MLAAttentionSpec):
            return "FlashAttention is used over keys and values, not over latents that are both"
        if query.layer.head_dim % 8:
            return f"FlashAttention needs head sizes that are multiples of 8, not {query.layer.head_dim}"
        if (package := missing_package()) is not None:
            return f"the package {package} is not installed"
        return super().unsupported_reason(query)

    @classmethod
    def start_compiling(cls, query: AttentionQuery) -> None:
        flash_library.start_compiling(Variant.of(query), torch.device("cuda", torch.cuda.current_device()))

    def _prefill(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        kv: torch.Tensor,
        part: StepPart,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        attend = flash_library.attend() if part.num_reqs <= MAX_REQUESTS else None
        if attend is None:
            return super()._prefill(layer, q, kv, part, sinks)
        window = window_of(layer)
        out = attend(
            q,
            kv[0],
            kv[1],
            cu_seqlens_q=part.query_start,
            max_seqlen_q=max(part.longest_query, ONE_KERNEL_TOKENS),
            max_seqlen_k=part.longest,
            seqused_k=part.seq_lens,
            page_table=part.block_table,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
            learnable_sink=sinks,
            softcap=layer.soft_cap or 0.0,
        )
        return out[0] if isinstance(out, tuple) else out
