"""The paged attention of `inferplane_kernels_cpu` as an attention backend."""

from __future__ import annotations

import torch

from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer, AttentionQuery
from inferplane.api.kv import FullAttentionSpec
from inferplane_kernels_cpu.attention_plan import AttentionPlan, KVShape, plan_attention
from inferplane_kernels_cpu.paged_attention import Scratch, allocate_kv, paged_attention, store_kv

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StepMetadata:
    """One step of a group. The plan is made at the first layer, whose KV tensor says how many slots there are."""

    def __init__(self, inputs: AttentionInputs) -> None:
        self._inputs = inputs
        self._shape: KVShape | None = None
        self._plan: AttentionPlan | None = None

    def plan(self, kv: torch.Tensor, num_heads: int) -> AttentionPlan:
        shape = KVShape.of(kv, num_heads)
        if self._plan is None or shape != self._shape:
            inputs = self._inputs
            self._shape = shape
            self._plan = plan_attention(
                inputs.query_lens_host,
                inputs.seq_lens_host,
                inputs.block_table,
                inputs.slot_mapping,
                shape,
            )
        return self._plan


class CpuPagedAttention(AttentionBackend):
    """Full attention in float32, bfloat16 and float16, of any head size and any block size.

    Keys and values of a layer lie as ``[2, num_kv_heads, num_blocks, block_size, head_dim]``.
    """

    name = "cpu_paged"
    priority = 10

    def __init__(self) -> None:
        self._scratch = Scratch()

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        layer = query.layer
        if type(layer.spec) is not FullAttentionSpec:
            return f"computes full attention only, not {type(layer.spec).__name__}"
        if layer.soft_cap is not None or layer.has_sinks:
            return "knows neither soft caps nor sinks"
        for dtype in (query.dtype, query.kv_dtype):
            if dtype not in _DTYPES:
                return f"computes in {', '.join(map(str, _DTYPES))}, not in {dtype}"
        return None

    @classmethod
    def allocate_kv(
        cls, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return allocate_kv(num_blocks, layer.num_kv_heads, layer.spec.block_size, layer.head_dim, dtype)

    def build_metadata(self, inputs: AttentionInputs) -> StepMetadata:
        return StepMetadata(inputs)

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
        plan = metadata.plan(kv, layer.num_heads)
        store_kv(k, v, kv, plan)
        return paged_attention(q, k, v, kv, plan, layer.scale, self._scratch)
