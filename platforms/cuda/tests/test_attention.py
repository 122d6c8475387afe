"""The platform's attention backends against the reference backend on the same steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from attention_steps import ragged_inputs
from inferplane.api import DeviceDescriptor
from inferplane.api.attention import AttentionBackend, AttentionLayer, AttentionQuery
from inferplane.api.kv import FullAttentionSpec, KVCacheSpec
from inferplane.reference.attention import ReferenceAttention
from inferplane_cuda.torch_attention import TorchAttention

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
STEPS = {
    "prefill": ([0, 0, 0], [17, 1, 40]),
    "chunks": ([16, 5, 33], [9, 20, 3]),
    "decode": ([1, 47, 64, 15], [1, 1, 1, 1]),
    "mixed": ([31, 0, 16], [1, 30, 5]),
}


def make_layer(dtype: torch.dtype, block_size: int) -> AttentionLayer:
    name = str(dtype).removeprefix("torch.")
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_dim=32, dtype=name)
    return AttentionLayer(name="l", num_heads=6, num_kv_heads=2, head_dim=32, scale=0.2, spec=spec)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("block_size", [1, 16, 128])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("backend_class", [TorchAttention])
def test_it_is_the_reference(
    backend_class: type[AttentionBackend],
    dtype: torch.dtype,
    block_size: int,
    step: str,
    device: torch.device,
) -> None:
    context_lens, query_lens = STEPS[step]
    num_blocks = 80 * len(query_lens) // block_size + 2 * len(query_lens)
    layer = make_layer(dtype, block_size)
    backends = [backend_class(), ReferenceAttention()]
    kvs = [b.allocate_kv(layer, num_blocks, dtype, device).fill_(math.nan) for b in backends]
    generator = torch.Generator().manual_seed(0)
    has_context = [length for length in context_lens if length]
    steps = [(context_lens, query_lens)]
    if has_context:
        # a request of no context stores one token here that the step then overwrites
        steps.insert(0, ([0] * len(context_lens), [max(1, length) for length in context_lens]))
    for contexts, queries in steps:
        inputs = ragged_inputs(contexts, queries, block_size=block_size, num_blocks=num_blocks, device=device)
        qkv = torch.randn(inputs.num_tokens, 10, 32, generator=generator).to(device, dtype)
        kept = qkv.clone()
        q, k, v = qkv.split([6, 2, 2], dim=1)
        got, want = (
            backend.forward(layer, q, k, v, kv, backend.build_metadata(inputs))
            for backend, kv in zip(backends, kvs)
        )
        assert (got.dtype, got.shape) == (dtype, q.shape)
        assert torch.equal(qkv, kept)
        torch.testing.assert_close(got, want, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_it_takes_the_bytes_that_its_spec_says(block_size: int) -> None:
    layer = make_layer(torch.bfloat16, block_size)
    kv = TorchAttention.allocate_kv(layer, 5, torch.bfloat16, torch.device("cpu"))
    assert kv.nbytes == 5 * layer.spec.block_bytes


def test_what_it_does_not_do() -> None:
    layer = make_layer(torch.float32, 16)

    def reason(layer: AttentionLayer) -> str | None:
        device = DeviceDescriptor("cuda", 0, "", 0)
        return TorchAttention.unsupported_reason(
            AttentionQuery(layer=layer, dtype=torch.float32, kv_dtype=torch.float32, device=device)
        )

    assert reason(layer) is None
    assert "full attention only" in (reason(replace(layer, spec=KVCacheSpec(block_size=16))) or "")
    assert "soft caps" in (reason(replace(layer, soft_cap=30.0)) or "")
    assert "sinks" in (reason(replace(layer, has_sinks=True)) or "")
