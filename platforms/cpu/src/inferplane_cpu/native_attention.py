"""The native paged attention of `inferplane_kernels_cpu` as an attention backend."""

from __future__ import annotations

import torch

from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer, AttentionQuery
from inferplane.api.kv import QUANTIZED_KV, ChunkedLocalSpec, MLAAttentionSpec, SlidingWindowSpec
from inferplane_cpu.attention import unserved_spec
from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native_attention import (
    CODES,
    DTYPES,
    MAX_HEAD_DIM,
    LayerShape,
    PagedAttention,
    QKNorm,
    Step,
    allocate_kv,
)


class CpuNativeAttention(AttentionBackend):
    """Attention over all tokens, a window or a chunk, with soft caps and sinks, in float32, bfloat16 and float16. Keys
    and values are stored alike, in int8 or fp8 or, of float32, in float16.

    Any mix of prompts and single tokens is one call a layer, norms of heads and rotation included. It is quickest with
    blocks of a multiple of 32 tokens and heads of a multiple of 16.
    """

    name = "cpu_native"
    priority = 20
    graph_safe = True
    quantized_kv = frozenset(QUANTIZED_KV)
    keeps_latent_rows = True
    fuses_rotary = True

    def __init__(self) -> None:
        self._kernels: dict[str, PagedAttention] = {}
        """By layer name."""

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        layer = query.layer
        if (reason := native.unavailable_reason()) is not None:
            return reason
        if (reason := unserved_spec(layer.spec)) is not None:
            return reason
        is_coded = query.kv_dtype in CODES and (query.dtype, query.dtype) in DTYPES
        if not is_coded and (query.dtype, query.kv_dtype) not in DTYPES:
            known = ", ".join(f"{dtype} over {kv_dtype}" for dtype, kv_dtype in DTYPES)
            return f"computes in {known}, not in {query.dtype} over {query.kv_dtype}"
        if layer.head_dim > MAX_HEAD_DIM:
            return f"has room for heads of up to {MAX_HEAD_DIM}, not of {layer.head_dim}"
        return None

    @classmethod
    def allocate_kv(
        cls, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        spec = layer.spec
        is_latent = isinstance(spec, MLAAttentionSpec)
        return allocate_kv(
            num_blocks, layer.num_kv_heads, spec.block_size, layer.head_dim, dtype, is_latent=is_latent
        )

    def build_metadata(self, inputs: AttentionInputs) -> Step:
        return Step(inputs.block_table, inputs.seq_lens, inputs.query_start, inputs.slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: torch.Tensor,
        metadata: Step,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attended = self._kernel(layer, q.dtype, kv.dtype).attend(q, k, v, kv, metadata, sinks=sinks)
        return attended[..., : v.shape[-1]]

    def rotary_forward(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: torch.Tensor,
        metadata: Step,
        *,
        qk_norm: QKNorm | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._kernel(layer, qkv.dtype, kv.dtype).rotate_and_attend(
            qkv, positions, cos_sin, kv, metadata, qk_norm=qk_norm, sinks=sinks
        )

    def _kernel(self, layer: AttentionLayer, dtype: torch.dtype, kv_dtype: torch.dtype) -> PagedAttention:
        kernel = self._kernels.get(layer.name)
        if kernel is None:
            spec = layer.spec
            shape = LayerShape(
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_dim,
                spec.block_size,
                spec.window if isinstance(spec, SlidingWindowSpec) else 0,
                spec.chunk if isinstance(spec, ChunkedLocalSpec) else 0,
                layer.scale,
                layer.soft_cap or 0.0,
                isinstance(spec, MLAAttentionSpec),
            )
            given = layer.kv_scales
            scales = None if given is None else (given.k, given.k if shape.is_latent else given.v)
            kernel = self._kernels[layer.name] = PagedAttention(shape, dtype, kv_dtype, kv_scales=scales)
        return kernel
