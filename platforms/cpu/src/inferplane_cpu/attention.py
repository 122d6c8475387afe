"""The paged attention of torch's products as an attention backend: for machines without the native library."""

from __future__ import annotations

import torch

from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer, AttentionQuery
from inferplane.api.kv import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from inferplane_kernels_cpu.attention_plan import AttentionPlan, KVShape, plan_attention
from inferplane_kernels_cpu.paged_attention import Scoring, Scratch, allocate_kv, paged_attention, store_kv

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalSpec, MLAAttentionSpec)


def unserved_spec(spec: KVCacheSpec) -> str | None:
    """Why neither attention of this platform computes it; None where both do."""
    if type(spec) in _SPECS:
        return None
    known = ", ".join(each.__name__ for each in _SPECS)
    return f"computes attention of {known}, not of {type(spec).__name__}"


class StepMetadata:
    """One step of a group. A plan is made at the first layer that needs it, whose KV says how many slots there are."""

    def __init__(self, inputs: AttentionInputs) -> None:
        self._inputs = inputs
        self._plans: dict[tuple[KVShape, bool], AttentionPlan] = {}

    def plan(self, layer: AttentionLayer, kv: torch.Tensor, may_fuse: bool) -> AttentionPlan:
        shape = KVShape.of(kv, layer.num_heads)
        plan = self._plans.get((shape, may_fuse))
        if plan is None:
            inputs = self._inputs
            plan = self._plans[shape, may_fuse] = plan_attention(
                inputs.query_lens_host,
                inputs.seq_lens_host,
                inputs.block_table,
                inputs.slot_mapping,
                shape,
                layer.spec.first_visible_token,
                may_fuse,
            )
        return plan


class CpuPagedAttention(AttentionBackend):
    """Attention over all tokens, a window or a chunk, with soft caps and sinks, in float32, bfloat16 and float16.

    Heads and blocks may have any size.

    Keys and values of a layer lie as ``[2, num_kv_heads, num_blocks, block_size, head_dim]``, latents as ``[1, …]``.
    """

    name = "cpu_paged"
    priority = 10
    keeps_latent_rows = True

    def __init__(self) -> None:
        self._scratch = Scratch()

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        if (reason := unserved_spec(query.layer.spec)) is not None:
            return reason
        for dtype in (query.dtype, query.kv_dtype):
            if dtype not in _DTYPES:
                return f"computes in {', '.join(map(str, _DTYPES))}, not in {dtype}"
        if query.kv_dtype != query.dtype:
            return f"stores keys and values as they are, not {query.dtype} as {query.kv_dtype}"
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
        scoring = Scoring(layer.scale, layer.soft_cap, sinks)
        plan = metadata.plan(layer, kv, may_fuse=scoring.is_plain)
        value_dim = v.shape[-1]
        if isinstance(layer.spec, MLAAttentionSpec):
            v = k
        store_kv(k, v, kv, plan)
        return paged_attention(q, k, v, kv, plan, scoring, self._scratch)[..., :value_dim]
