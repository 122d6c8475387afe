"""Level 3: each attention backend over requests that live through several steps, against float64 and brute force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from inferplane.api.attention import AttentionBackend, AttentionLayer, AttentionQuery
from inferplane.api.kv import (
    QUANTIZED_KV,
    AttentionSpec,
    ChunkedLocalSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from inferplane.api.kv_dtype import KVScales, stored_type
from inferplane_conformance.attention_oracle import attend
from inferplane_conformance.attention_steps import Requests
from inferplane_conformance.closeness import assert_close
from inferplane_conformance.kv_oracle import stored_numbers
from inferplane_conformance.pytest_plugin import KitOptions
from inferplane_conformance.quick import crossed
from inferplane_conformance.subject import Subject

pytestmark = pytest.mark.beside_others

BLOCK_SIZES = (16, 32, 64)
"""Tried besides the platform's own; one that the backend refuses is left out."""
RUBBISH = 128.0
"""In slots that were never written: large enough to show once it is attended to, and finite, because kernels that load
whole tiles multiply it by a weight of zero."""
TOLERANCES = {torch.float32: (1e-4, 2e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (4e-3, 4e-3)}


@dataclass(frozen=True)
class Shape:
    """A layer without its spec."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    soft_cap: float | None = None
    has_sinks: bool = False


SHAPES = {
    "grouped": Shape(),
    "as many KV heads": Shape(num_kv_heads=4),
    "one KV head": Shape(num_heads=6, num_kv_heads=1, head_dim=32),
    "head of 128": Shape(num_heads=2, num_kv_heads=1, head_dim=128),
    "head of 80": Shape(head_dim=80),
    "soft cap": Shape(soft_cap=3.0),
    "sinks": Shape(has_sinks=True),
    "soft cap and sinks": Shape(soft_cap=2.0, has_sinks=True),
}
SPECS: dict[str, tuple[type[AttentionSpec], dict[str, Any]]] = {
    "full": (FullAttentionSpec, {}),
    "window of 5": (SlidingWindowSpec, {"window": 5}),
    "window of 32": (SlidingWindowSpec, {"window": 32}),
    "chunk of 24": (ChunkedLocalSpec, {"chunk": 24}),
}

LATENTS = {
    "4 heads": (Shape(num_heads=4, num_kv_heads=1, head_dim=48), 16),
    "16 heads of 512 and 64": (Shape(num_heads=16, num_kv_heads=1, head_dim=576), 64),
}
"""A layer's latent with the rotated part of the key, and the size of that part."""


QUANTIZED_CASES = {
    "full": ("grouped", "full"),
    "head of 80": ("head of 80", "full"),
    "soft cap and sinks in a window": ("soft cap and sinks", "window of 32"),
    "chunks": ("grouped", "chunk of 24"),
}
"""A shape and a spec."""


def make_layer(
    shape: Shape, spec: type[AttentionSpec], settings: dict[str, Any], block_size: int, dtype: torch.dtype
) -> AttentionLayer:
    made = spec(
        block_size=block_size,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=str(dtype).removeprefix("torch."),
        **settings,
    )
    return AttentionLayer(
        name="layer",
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        spec=made,
        soft_cap=shape.soft_cap,
        has_sinks=shape.has_sinks,
    )


def backends(subject: Subject, layer: AttentionLayer, dtype: torch.dtype) -> list[type[AttentionBackend]]:
    """Those that would serve the layer: the platform's own that say so, and the one that is used."""
    kv_dtype = stored_type(layer.spec, dtype)
    query = AttentionQuery(layer=layer, dtype=dtype, kv_dtype=kv_dtype, device=subject.device)
    decision = subject.plugins.attention_decision(query)
    own = [
        each.implementation
        for each in decision.candidates
        if each.reason is None and each.plugin == subject.device.platform
    ]
    return list(dict.fromkeys([*own, decision.chosen.implementation]))


@torch.inference_mode()
@pytest.mark.parametrize(("shape", "spec"), crossed(SHAPES, SPECS, "grouped", "full"))
def test_attention(
    subject: Subject, kit_options: KitOptions, dtype: torch.dtype, shape: str, spec: str
) -> None:
    """Rows are right whatever else is in the step, and what a request stored is what it finds later."""
    spec_class, settings = SPECS[spec]
    layer = make_layer(SHAPES[shape], spec_class, settings, platform_block_size(subject), dtype)
    run_all(subject, layer, dtype, () if kit_options.is_quick else BLOCK_SIZES)


@torch.inference_mode()
@pytest.mark.parametrize("shape", LATENTS)
def test_latent_attention(subject: Subject, kit_options: KitOptions, dtype: torch.dtype, shape: str) -> None:
    """Attention to latents, which are keys and values at once (MLA)."""
    sizes, rope_dim = LATENTS[shape]
    settings = {"rope_dim": rope_dim}
    layer = make_layer(sizes, MLAAttentionSpec, settings, platform_block_size(subject), dtype)
    run_all(subject, layer, dtype, () if kit_options.is_quick else BLOCK_SIZES)


@torch.inference_mode()
@pytest.mark.parametrize("kv_dtype", QUANTIZED_KV)
@pytest.mark.parametrize("case", QUANTIZED_CASES)
def test_quantized_kv(
    subject: Subject, kit_options: KitOptions, dtype: torch.dtype, case: str, kv_dtype: str
) -> None:
    """What is read back of keys and values is what their KV dtype makes of them, whoever serves it."""
    shape, spec = QUANTIZED_CASES[case]
    spec_class, settings = SPECS[spec]
    layer = make_layer(SHAPES[shape], spec_class, settings, platform_block_size(subject), dtype)
    run_all(subject, quantized(layer, kv_dtype, subject), dtype, () if kit_options.is_quick else BLOCK_SIZES)


@torch.inference_mode()
@pytest.mark.parametrize("kv_dtype", QUANTIZED_KV)
def test_quantized_latent(subject: Subject, dtype: torch.dtype, kv_dtype: str) -> None:
    sizes, rope_dim = LATENTS["4 heads"]
    settings = {"rope_dim": rope_dim}
    layer = make_layer(sizes, MLAAttentionSpec, settings, platform_block_size(subject), dtype)
    run_all(subject, quantized(layer, kv_dtype, subject), dtype, ())


def quantized(layer: AttentionLayer, kv_dtype: str, subject: Subject) -> AttentionLayer:
    """The same with another KV dtype and, of fp8, a scale for each head: powers of two, by which dividing is exact."""
    spec, scales = replace(layer.spec, dtype=kv_dtype), None  # type: ignore[call-arg]
    if kv_dtype.startswith("fp8"):
        powers = torch.arange(layer.num_kv_heads, dtype=torch.float32)
        k, v = (subject.runtime.to_device(torch.exp2(each)) for each in (powers - 2, 1 - powers))
        scales = KVScales(k, v)
    return replace(layer, spec=spec, kv_scales=scales)


def run_all(
    subject: Subject, default: AttentionLayer, dtype: torch.dtype, block_sizes: Sequence[int]
) -> None:
    """Every backend that would serve the layer, in its own size of blocks and each of the others that it takes."""
    generator = torch.Generator().manual_seed(1)
    sinks = torch.randn(default.num_heads, generator=generator) if default.has_sinks else None
    # a token sees none after it, so that whole sequences say what is right for every step
    requests = Requests(default, dtype).requests
    expected = [attend(default, each.q, *stored_numbers(default, each.k, each.v), sinks) for each in requests]
    for block_size in dict.fromkeys((default.spec.block_size, *block_sizes)):
        layer = replace(default, spec=replace(default.spec, block_size=block_size))
        if block_size != default.spec.block_size and not takes(subject, layer, dtype):
            continue
        for backend in backends(subject, layer, dtype):
            run(subject, backend, layer, dtype, sinks, expected)


def takes(subject: Subject, layer: AttentionLayer, dtype: torch.dtype) -> bool:
    """Whether the platform has a backend of its own for a block size that it did not choose."""
    return any(backend.name != "reference" for backend in backends(subject, layer, dtype))


def platform_block_size(subject: Subject) -> int:
    return int(subject.defaults("float32")["block_size"])


def run(
    subject: Subject,
    backend: type[AttentionBackend],
    layer: AttentionLayer,
    dtype: torch.dtype,
    sinks: torch.Tensor | None,
    expected: Sequence[torch.Tensor],
) -> None:
    """``expected``: of each request the result for all of its tokens."""
    runtime, requests = subject.runtime, Requests(layer, dtype)
    kv_dtype = stored_type(layer.spec, dtype)
    kv = backend.allocate_kv(layer, requests.num_blocks, kv_dtype, runtime.torch_device)
    assert kv.device == runtime.torch_device
    taken = kv.numel() * kv.element_size()
    assert taken == layer.spec.block_bytes * requests.num_blocks, f"{backend.name} takes {taken} bytes"
    if kv.is_floating_point():
        kv.fill_(RUBBISH)
    device_sinks = None if sinks is None else runtime.to_device(sinks)
    instance = backend()
    for number, step in enumerate(requests.steps(runtime)):
        before = [runtime.to_host(each).clone() for each in (step.q, step.k, step.v)]
        metadata = instance.build_metadata(step.inputs)
        out = instance.forward(layer, step.q, step.k, step.v, kv, metadata, sinks=device_sinks)
        where = f"{backend.name}, blocks of {layer.spec.block_size}, step {number}"
        assert out.dtype == dtype, f"{where}: {out.dtype} instead of {dtype}"
        for tensor, was in zip((step.q, step.k, step.v), before):
            assert torch.equal(runtime.to_host(tensor), was), f"{where}: q, k or v was changed"
        found = runtime.to_host(out)
        for request, rows in step.members:
            done = request.num_done
            wanted = expected[request.index][done - (rows.stop - rows.start) : done]
            assert_close(found[rows], wanted, TOLERANCES[dtype], f"{where}, request {request.index}")
