"""The shared attention backends against the reference backend on the same steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_parity import (
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    STEPS,
    TOLERANCES,
    compare,
    make_layer,
    reason_of,
    with_latents,
    with_window,
)
from attention_steps import ragged_inputs
from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer
from inferplane.api.kv import ChunkedLocalSpec, KVCacheSpec
from inferplane.api.kv_dtype import KVScales
from inferplane.api.ops import rms_norm, rotary
from inferplane.reference.attention import ReferenceAttention
from inferplane_torch_accelerator import triton_attention
from inferplane_torch_accelerator.launch import Launch
from inferplane_torch_accelerator.torch_attention import TorchAttention
from inferplane_torch_accelerator.triton_attention import StepPart
from kernel_checks import SLOW_WHEN_INTERPRETED


class TritonAttention(triton_attention.TritonAttention):
    """As a platform names it."""

    name = "acme_triton"
    launch = Launch("nvidia")


BLOCK_SIZES = {TorchAttention: (1, 16, 128), TritonAttention: (16, 128)}


def is_for_gpus(backend: type[AttentionBackend], block_size: int, dtype: torch.dtype) -> bool:
    """The interpreter is slow, so that only a selection of what it runs is left to the host."""
    on_host = [(16, torch.float32), (128, torch.float16)]
    return backend is TritonAttention and (block_size, dtype) not in on_host


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
        for dtype in TOLERANCES
    ]


def usable(backend: type[AttentionBackend], dtype: torch.dtype, device: torch.device) -> None:
    if backend is TritonAttention and dtype is torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies no bfloat16")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("backend", "block_size", "dtype"), backend_cases())
def test_it_is_the_reference(
    backend: type[AttentionBackend], block_size: int, dtype: torch.dtype, step: str, device: torch.device
) -> None:
    usable(backend, dtype, device)
    compare(backend(), make_layer(dtype, block_size), dtype, step, device)


DECODE_AND_MIXED = [pytest.param("decode", marks=SLOW_WHEN_INTERPRETED), "mixed"]
"""A mixed step begins with single tokens, which have a kernel of their own."""


@pytest.mark.parametrize("variant", ["window", "soft cap", "sinks"])
@pytest.mark.parametrize("step", DECODE_AND_MIXED)
def test_variants(step: str, variant: str, device: torch.device) -> None:
    dtype = torch.float32
    layer, sinks = make_layer(dtype, 16), None
    if variant == "window":
        layer = with_window(layer, 7)
    elif variant == "soft cap":
        layer = replace(layer, soft_cap=3.0)
    else:
        layer = replace(layer, has_sinks=True)
        sinks = torch.randn(NUM_HEADS, generator=torch.Generator().manual_seed(1)).to(device)
    compare(TritonAttention(), layer, dtype, step, device, sinks)


@pytest.mark.parametrize("backend", BLOCK_SIZES)
@pytest.mark.parametrize("step", STEPS)
def test_latents(step: str, backend: type[AttentionBackend], device: torch.device) -> None:
    compare(backend(), with_latents(make_layer(torch.float32, 16), 8), torch.float32, step, device)


def as_fp8(layer: AttentionLayer, kv_dtype: str, device: torch.device) -> AttentionLayer:
    """With a scale for each head, powers of two: dividing by them is exact."""
    scales = KVScales(torch.tensor([0.5, 2.0], device=device), torch.tensor([0.25, 1.0], device=device))
    return replace(layer, spec=replace(layer.spec, dtype=kv_dtype), kv_scales=scales)  # type: ignore[call-arg]


@pytest.mark.parametrize("kv_dtype", sorted(triton_attention.FP8))
@pytest.mark.parametrize("step", DECODE_AND_MIXED)
def test_an_fp8_cache(step: str, kv_dtype: str, device: torch.device) -> None:
    layer = as_fp8(make_layer(torch.float32, 16), kv_dtype, device)
    compare(TritonAttention(), layer, torch.float32, step, device)


def as_int8(layer: AttentionLayer) -> AttentionLayer:
    return replace(layer, spec=replace(layer.spec, dtype=triton_attention.INT8))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("step", "variant"),
    [
        pytest.param(
            step, variant, marks=[] if variant == "plain" or step == "mixed" else SLOW_WHEN_INTERPRETED
        )
        for step in STEPS
        for variant in ("plain", "window", "soft cap")
    ],
)
def test_an_int8_cache(step: str, variant: str, device: torch.device) -> None:
    layer = make_layer(torch.float32, 16)
    if variant == "window":
        layer = with_window(layer, 7)
    elif variant == "soft cap":
        layer = replace(layer, soft_cap=3.0)
    compare(TritonAttention(), as_int8(layer), torch.float32, step, device)


def test_an_int8_cache_takes_the_bytes_that_its_spec_says(device: torch.device) -> None:
    layer = as_int8(make_layer(torch.bfloat16, 16))
    kv = TritonAttention.allocate_kv(layer, 5, torch.int8, device)
    assert kv.nbytes == 5 * layer.spec.block_bytes
    latents = as_int8(with_latents(make_layer(torch.float32, 16), 8))
    assert "not in int8" in reason_of(TritonAttention, latents)


def test_latents_in_an_fp8_cache(device: torch.device) -> None:
    layer = with_latents(make_layer(torch.float32, 16), 8)
    scales = KVScales(torch.tensor([0.5], device=device), torch.tensor([4.0], device=device))
    spec = replace(layer.spec, dtype="fp8_e4m3")  # type: ignore[call-arg]
    layer = replace(layer, spec=spec, kv_scales=scales)
    compare(TritonAttention(), layer, torch.float32, "mixed", device)


@pytest.mark.parametrize(("step", "has_norm"), [("decode", False), ("mixed", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_int8", [False, True])
def test_rotation_in_one_with_the_rest(
    is_int8: bool, dtype: torch.dtype, step: str, has_norm: bool, device: torch.device
) -> None:
    usable(TritonAttention, dtype, device)
    backend, reference, layer = TritonAttention(), ReferenceAttention(), make_layer(dtype, 16)
    layer = as_int8(layer) if is_int8 else layer
    num_blocks = 8
    steps = [([0, 0], [5, 16]), ([5, 16], [1, 1] if step == "decode" else [6, 1])]
    stored = torch.int8 if is_int8 else dtype
    kvs = [b.allocate_kv(layer, num_blocks, stored, device) for b in (backend, reference)]
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
    whole = make_layer(torch.bfloat16, block_size)
    for layer in (whole, with_latents(whole, 8)):
        kv = TorchAttention.allocate_kv(layer, 5, torch.bfloat16, torch.device("cpu"))
        assert kv.nbytes == 5 * layer.spec.block_bytes


def test_what_torch_does_not_do() -> None:
    layer = make_layer(torch.float32, 16)
    assert not reason_of(TorchAttention, layer)
    assert "attention to latents only" in reason_of(
        TorchAttention, replace(layer, spec=KVCacheSpec(block_size=16))
    )
    assert "soft caps" in reason_of(TorchAttention, replace(layer, soft_cap=30.0))
    assert "sinks" in reason_of(TorchAttention, replace(layer, has_sinks=True))


def test_what_triton_does_not_do() -> None:
    layer = make_layer(torch.float32, 16)
    assert not reason_of(TritonAttention, layer)
    assert not reason_of(TritonAttention, with_window(layer, 8))
    chunked = replace(layer, spec=ChunkedLocalSpec(chunk=8, **vars(layer.spec)))
    assert "not ChunkedLocalSpec" in reason_of(TritonAttention, chunked)
    assert "not in torch.float64" in reason_of(TritonAttention, layer, torch.float64)
    assert "power of two from 16 tokens, not of 24" in reason_of(
        TritonAttention, make_layer(torch.float32, 24)
    )
    assert "not of 512" in reason_of(TritonAttention, replace(layer, head_dim=512))
    fp8 = as_fp8(layer, "fp8_e5m2", torch.device("cpu"))
    assert "lacks fp8_e4m3_matmul" in reason_of(TritonAttention, fp8)
    assert not reason_of(TritonAttention, fp8, torch.float32, "fp8_e4m3_matmul")


@pytest.mark.parametrize(
    ("query_lens", "num_decodes"), [([1, 1, 1], 3), ([1, 1, 7, 1, 2], 2), ([4, 1], 0), ([1], 1)]
)
def test_a_step_is_split_after_its_leading_single_tokens(query_lens: list[int], num_decodes: int) -> None:
    contexts = [10 + index for index in range(len(query_lens))]
    inputs: AttentionInputs = ragged_inputs(contexts, query_lens, block_size=16, num_blocks=24)
    metadata = TritonAttention().build_metadata(inputs)
    parts = (metadata.decodes, metadata.prompts)
    spans = ((0, num_decodes), (num_decodes, len(query_lens)))
    for part, (first, end) in zip(parts, spans):
        assert (part is None) == (first == end)
        if part is not None:
            assert part.num_reqs == end - first
            assert torch.equal(part.query_start, inputs.query_start[first : end + 1])
            assert torch.equal(part.seq_lens, inputs.seq_lens[first:end])
            assert torch.equal(part.block_table, inputs.block_table[first:end])
            assert part.longest_query == max(query_lens[first:end])
            assert part.longest == max(inputs.seq_lens_host[first:end])


def test_single_tokens_of_a_mixed_step_go_to_the_kernel_that_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}
    backend = TritonAttention()
    prefill, decode = backend._prefill, backend._decode

    def spy_prefill(
        layer: object, q: torch.Tensor, kv: object, part: StepPart, *rest: object
    ) -> torch.Tensor:
        seen["prompts"] = part.num_reqs
        return prefill(layer, q, kv, part, *rest)  # type: ignore[arg-type]

    def spy_decode(layer: object, q: torch.Tensor, *rest: object) -> torch.Tensor:
        seen["single tokens"] = len(q)
        return decode(layer, q, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "_prefill", spy_prefill)
    monkeypatch.setattr(backend, "_decode", spy_decode)
    layer = make_layer(torch.float32, 16)
    inputs = ragged_inputs([3, 20, 0], [1, 1, 5], block_size=16, num_blocks=9)
    kv = backend.allocate_kv(layer, 9, torch.float32, torch.device("cpu"))
    q, k, v = torch.randn(7, 10, HEAD_DIM).split([6, 2, 2], dim=1)
    backend.forward(layer, q, k, v, kv, backend.build_metadata(inputs))
    assert seen == {"prompts": 1, "single tokens": 2}
