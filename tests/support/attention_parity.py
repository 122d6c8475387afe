"""An attention backend and the reference backend on the same steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from attention_steps import ragged_inputs
from inferplane.api import CapabilitySet, DeviceDescriptor
from inferplane.api.attention import AttentionBackend, AttentionLayer, AttentionQuery
from inferplane.api.kv import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
from inferplane.api.kv_dtype import stored_type
from inferplane.reference.attention import ReferenceAttention

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
HALF = (torch.bfloat16, torch.float16)
STEPS = {
    "prefill": ([0, 0, 0], [17, 1, 40]),
    "chunks": ([16, 5, 33], [9, 20, 3]),
    "decode": ([1, 47, 64, 15], [1, 1, 1, 1]),
    "mixed": ([31, 40, 0, 16, 7], [1, 1, 30, 5, 1]),
}
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 32


def make_layer(dtype: torch.dtype, block_size: int, **more: object) -> AttentionLayer:
    name = str(dtype).removeprefix("torch.")
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype=name)
    layer = AttentionLayer(
        name="l", num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, scale=0.2, spec=spec
    )
    return replace(layer, **more)


def with_window(layer: AttentionLayer, window: int) -> AttentionLayer:
    spec = layer.spec
    return replace(layer, spec=SlidingWindowSpec(window=window, **vars(spec)))


def with_latents(layer: AttentionLayer, rope_dim: int) -> AttentionLayer:
    spec = MLAAttentionSpec(rope_dim=rope_dim, **{**vars(layer.spec), "num_kv_heads": 1})
    return replace(layer, num_kv_heads=1, spec=spec)


def _steps_of(step: str) -> tuple[list[tuple[Sequence[int], Sequence[int]]], int]:
    """The steps that lead to one and that one itself, and blocks of one token that they need."""
    context_lens, query_lens = STEPS[step]
    steps: list[tuple[Sequence[int], Sequence[int]]] = [(context_lens, query_lens)]
    if any(context_lens):
        # a request of no context stores one token here that the step then overwrites
        steps.insert(0, ([0] * len(context_lens), [max(1, length) for length in context_lens]))
    return steps, 80 * len(query_lens)


def compare(
    backend: AttentionBackend,
    layer: AttentionLayer,
    dtype: torch.dtype,
    step: str,
    device: torch.device,
    sinks: torch.Tensor | None = None,
    *,
    takes_nan: bool = True,
) -> None:
    """Runs the step, and what leads to it, on the backend and on the reference; what was never written is NaN where the
    backend takes that."""
    steps, num_slots = _steps_of(step)
    block_size = layer.spec.block_size
    num_blocks = num_slots // block_size + 2 * len(STEPS[step][0])
    reference = ReferenceAttention()
    kv_dtype = stored_type(layer.spec, dtype)
    kvs = [b.allocate_kv(layer, num_blocks, kv_dtype, device) for b in (backend, reference)]
    if takes_nan:
        for kv in kvs:
            # bytes of int8 are those of a scale that is NaN
            kv.fill_(math.nan if kv.is_floating_point() else -1)
    generator = torch.Generator().manual_seed(0)
    for contexts, queries in steps:
        inputs = ragged_inputs(contexts, queries, block_size=block_size, num_blocks=num_blocks, device=device)
        heads = NUM_HEADS + 2 * NUM_KV_HEADS
        qkv = torch.randn(inputs.num_tokens, heads, HEAD_DIM, generator=generator).to(device, dtype)
        if layer.kv_scales is not None and device.type == "cpu":
            # Triton's interpreter loses the carry when it rounds to fp8: numbers that need no rounding
            qkv = (2 * qkv).round().clamp(-7, 7) / 4
        kept = qkv.clone()
        q, k, v = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        if isinstance(layer.spec, MLAAttentionSpec):
            k = k[:, :1]
            v = k[..., : layer.spec.latent_rank]
        got, want = (
            each.forward(layer, q, k, v, kv, each.build_metadata(inputs), sinks=sinks)
            for each, kv in zip((backend, reference), kvs)
        )
        assert (got.dtype, got.shape) == (dtype, (*q.shape[:2], v.shape[-1]))
        assert torch.equal(qkv, kept)
        torch.testing.assert_close(got, want, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def reason_of(
    backend: type[AttentionBackend],
    layer: AttentionLayer,
    dtype: torch.dtype = torch.float32,
    *capabilities: str,
) -> str:
    device = DeviceDescriptor("acme", 0, "a GPU", 0, CapabilitySet(capabilities))
    kv_dtype = stored_type(layer.spec, dtype)
    query = AttentionQuery(layer=layer, dtype=dtype, kv_dtype=kv_dtype, device=device)
    return backend.unsupported_reason(query) or ""
