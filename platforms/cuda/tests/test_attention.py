"""The platform's attention backends against the reference backend on the same steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from attention_steps import ragged_inputs
from inferplane.api import CapabilitySet, DeviceDescriptor
from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer, AttentionQuery
from inferplane.api.kv import ChunkedLocalSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from inferplane.api.ops import rms_norm, rotary
from inferplane.reference.attention import ReferenceAttention
from inferplane_cuda.flash_attention import FlashAttention
from inferplane_cuda.torch_attention import TorchAttention
from inferplane_cuda.triton_attention import TritonAttention

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
HALF = (torch.bfloat16, torch.float16)
STEPS = {
    "prefill": ([0, 0, 0], [17, 1, 40]),
    "chunks": ([16, 5, 33], [9, 20, 3]),
    "decode": ([1, 47, 64, 15], [1, 1, 1, 1]),
    "mixed": ([31, 0, 16], [1, 30, 5]),
}
BLOCK_SIZES = {TorchAttention: (1, 16, 128), TritonAttention: (16, 128), FlashAttention: (16, 64, 128)}
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 32


def is_for_gpus(backend: type[AttentionBackend], block_size: int, dtype: torch.dtype) -> bool:
    """FlashAttention always. The interpreter is slow, so that only a selection of the rest is left to the host."""
    on_host = [(16, torch.float32), (128, torch.float16)]
    return backend is FlashAttention or (backend is TritonAttention and (block_size, dtype) not in on_host)


def backend_cases() -> list[object]:
    return [
        pytest.param(
            backend,
            block_size,
            dtype,
            marks=[pytest.mark.gpu] if is_for_gpus(backend, block_size, dtype) else [],
        )
        for backend, block_sizes in BLOCK_SIZES.items()
        for block_size in block_sizes
        for dtype in (HALF if backend is FlashAttention else TOLERANCES)
    ]


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


def usable(backend: type[AttentionBackend], dtype: torch.dtype, device: torch.device) -> None:
    if backend is TritonAttention and dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies no bfloat16")
    if backend is FlashAttention:
        if device.type != "cuda":
            pytest.skip("FlashAttention runs on GPUs only")
        pytest.importorskip("flash_attn.cute")


def steps_of(step: str) -> tuple[list[tuple[Sequence[int], Sequence[int]]], int]:
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
) -> None:
    """Runs the step, and what leads to it, on the backend and on the reference."""
    steps, num_slots = steps_of(step)
    block_size = layer.spec.block_size
    num_blocks = num_slots // block_size + 2 * len(STEPS[step][0])
    reference = ReferenceAttention()
    kvs = [b.allocate_kv(layer, num_blocks, dtype, device) for b in (backend, reference)]
    if not isinstance(backend, FlashAttention):
        for kv in kvs:
            kv.fill_(math.nan)
    generator = torch.Generator().manual_seed(0)
    for contexts, queries in steps:
        inputs = ragged_inputs(contexts, queries, block_size=block_size, num_blocks=num_blocks, device=device)
        heads = NUM_HEADS + 2 * NUM_KV_HEADS
        qkv = torch.randn(inputs.num_tokens, heads, HEAD_DIM, generator=generator).to(device, dtype)
        kept = qkv.clone()
        q, k, v = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        got, want = (
            each.forward(layer, q, k, v, kv, each.build_metadata(inputs), sinks=sinks)
            for each, kv in zip((backend, reference), kvs)
        )
        assert (got.dtype, got.shape) == (dtype, q.shape)
        assert torch.equal(qkv, kept)
        torch.testing.assert_close(got, want, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("backend", "block_size", "dtype"), backend_cases())
def test_it_is_the_reference(
    backend: type[AttentionBackend], block_size: int, dtype: torch.dtype, step: str, device: torch.device
) -> None:
    usable(backend, dtype, device)
    compare(backend(), make_layer(dtype, block_size), dtype, step, device)


@pytest.mark.parametrize("variant", ["window", "soft cap", "sinks"])
@pytest.mark.parametrize("step", ["decode", "mixed"])
@pytest.mark.parametrize("backend", [TritonAttention, pytest.param(FlashAttention, marks=pytest.mark.gpu)])
def test_variants(backend: type[AttentionBackend], step: str, variant: str, device: torch.device) -> None:
    dtype = torch.bfloat16 if backend is FlashAttention else torch.float32
    usable(backend, dtype, device)
    layer, sinks = make_layer(dtype, 16), None
    if variant == "window":
        layer = with_window(layer, 7)
    elif variant == "soft cap":
        layer = replace(layer, soft_cap=3.0)
    else:
        layer = replace(layer, has_sinks=True)
        sinks = torch.randn(NUM_HEADS, generator=torch.Generator().manual_seed(1)).to(device)
    compare(backend(), layer, dtype, step, device, sinks)


@pytest.mark.parametrize(("step", "has_norm"), [("decode", False), ("mixed", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_in_one_with_the_rest(
    dtype: torch.dtype, step: str, has_norm: bool, device: torch.device
) -> None:
    usable(TritonAttention, dtype, device)
    backend, reference, layer = TritonAttention(), ReferenceAttention(), make_layer(dtype, 16)
    num_blocks = 8
    steps = [([0, 0], [5, 16]), ([5, 16], [1, 1] if step == "decode" else [6, 1])]
    kvs = [b.allocate_kv(layer, num_blocks, dtype, device) for b in (backend, reference)]
    generator = torch.Generator().manual_seed(0)
    angles = torch.randn(128, HEAD_DIM // 2, generator=generator)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).to(device)
    norms = torch.randn(2, HEAD_DIM, generator=generator).to(device, dtype)
    qk_norm = (norms[0], norms[1], 1e-6) if has_norm else None
    for contexts, queries in steps:
        inputs = ragged_inputs(contexts, queries, block_size=16, num_blocks=num_blocks, device=device)
        qkv = torch.randn(inputs.num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, generator=generator)
        qkv = qkv.to(device, dtype)
        positions = torch.cat([torch.arange(c, c + n) for c, n in zip(contexts, queries)]).to(device)
        q, k, v = qkv.view(len(qkv), -1, HEAD_DIM).split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        if qk_norm is not None:
            q, k = rms_norm(q, norms[0], 1e-6), rms_norm(k, norms[1], 1e-6)
        q, k = rotary(q, k, positions, cos_sin)
        want = reference.forward(layer, q, k, v, kvs[1], reference.build_metadata(inputs))
        metadata = backend.build_metadata(inputs)
        got = backend.rotary_forward(layer, qkv, positions, cos_sin, kvs[0], metadata, qk_norm=qk_norm)
        tolerance = 3 * TOLERANCES[dtype]
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_metadata_for_a_graph_holds_for_other_contents(device: torch.device) -> None:
    """As in a graph: the tensors stay, what is in them changes, and the lengths known before are upper bounds."""
    backend, reference, layer = TritonAttention(), ReferenceAttention(), make_layer(torch.float32, 16)
    kvs = [b.allocate_kv(layer, 24, torch.float32, device).normal_() for b in (backend, reference)]
    kvs[1].copy_(kvs[0])
    lengths = [[1, 1, 1], [40, 3, 97], [128, 16, 64]]
    steps = [
        ragged_inputs([n - 1 for n in each], [1, 1, 1], block_size=16, num_blocks=24, device=device)
        for each in lengths
    ]
    held = replace(steps[0], seq_lens_host=[128] * 3, for_graph=True)
    metadata = backend.build_metadata(held)
    for inputs in steps:
        for name in ("query_start", "seq_lens", "block_table", "slot_mapping"):
            getattr(held, name).copy_(getattr(inputs, name))
        backend.refresh_metadata(metadata, replace(inputs, seq_lens=held.seq_lens))
        q, k, v = torch.randn(3, 10, HEAD_DIM).to(device).split([6, 2, 2], dim=1)
        got = backend.forward(layer, q, k, v, kvs[0], metadata)
        want = reference.forward(layer, q, k, v, kvs[1], reference.build_metadata(inputs))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_it_takes_the_bytes_that_its_spec_says(block_size: int) -> None:
    layer = make_layer(torch.bfloat16, block_size)
    kv = TorchAttention.allocate_kv(layer, 5, torch.bfloat16, torch.device("cpu"))
    assert kv.nbytes == 5 * layer.spec.block_bytes


def reason(
    backend: type[AttentionBackend],
    layer: AttentionLayer,
    dtype: torch.dtype = torch.float32,
    *capabilities: str,
) -> str:
    device = DeviceDescriptor("cuda", 0, "a GPU", 0, CapabilitySet(capabilities))
    query = AttentionQuery(layer=layer, dtype=dtype, kv_dtype=dtype, device=device)
    return backend.unsupported_reason(query) or ""


def test_what_torch_does_not_do() -> None:
    layer = make_layer(torch.float32, 16)
    assert not reason(TorchAttention, layer)
    assert "full attention only" in reason(TorchAttention, replace(layer, spec=KVCacheSpec(block_size=16)))
    assert "soft caps" in reason(TorchAttention, replace(layer, soft_cap=30.0))
    assert "sinks" in reason(TorchAttention, replace(layer, has_sinks=True))


def test_what_triton_does_not_do() -> None:
    layer = make_layer(torch.float32, 16)
    assert not reason(TritonAttention, layer)
    assert not reason(TritonAttention, with_window(layer, 8))
    chunked = replace(layer, spec=ChunkedLocalSpec(chunk=8, **vars(layer.spec)))
    assert "not ChunkedLocalSpec" in reason(TritonAttention, chunked)
    assert "not in torch.float64" in reason(TritonAttention, layer, torch.float64)
    assert "power of two from 16 tokens, not of 24" in reason(TritonAttention, make_layer(torch.float32, 24))
    assert "not for 512" in reason(TritonAttention, replace(layer, head_dim=512))


def test_what_flash_attention_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, half = make_layer(torch.bfloat16, 16), torch.bfloat16
    assert "not in torch.float32" in reason(FlashAttention, layer)
    assert "a GPU lacks bulk_tensor_copy" in reason(FlashAttention, layer, half)
    assert "multiples of 8" in reason(FlashAttention, replace(layer, head_dim=36), half, "bulk_tensor_copy")
    monkeypatch.setattr("inferplane_cuda.flash_attention._is_installed", lambda: False)
    assert "not installed" in reason(FlashAttention, layer, half, "bulk_tensor_copy")
    monkeypatch.setattr("inferplane_cuda.flash_attention._is_installed", lambda: True)
    assert not reason(FlashAttention, layer, half, "bulk_tensor_copy")


def test_inputs_are_one_step(device: torch.device) -> None:
    inputs: AttentionInputs = ragged_inputs([3], [2], block_size=16, num_blocks=4, device=device)
    assert not TritonAttention().build_metadata(inputs).is_decode
    assert TritonAttention().build_metadata(ragged_inputs([3], [1], block_size=16, num_blocks=4)).is_decode
