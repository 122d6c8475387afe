"""The backend as the runner uses it, step after step, against the reference backend on the same steps."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from inferplane.api import DeviceDescriptor
from inferplane.api.attention import AttentionBackend, AttentionInputs, AttentionLayer, AttentionQuery
from inferplane.api.kv import (
    AttentionSpec,
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from inferplane.api.kv_dtype import KVScales
from inferplane.plugins import load_plugins
from inferplane_cpu.attention import CpuPagedAttention
from inferplane_cpu.native_attention import CpuNativeAttention
from inferplane_kernels_cpu import native

NUM_BLOCKS = 64
TOLERANCES = {"float32": 3e-6, "bfloat16": 1.5e-2, "float16": 2e-3}

needs_native = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=str(native.unavailable_reason())
)
BACKENDS: list[Any] = [CpuPagedAttention, pytest.param(CpuNativeAttention, marks=needs_native)]
CODES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8_per_token_head": torch.int8,
}
"""KV dtypes that only the native attention stores."""

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 9, "soft_cap": 1.5},
    "chunk": {"chunk": 7, "has_sinks": True},
    "latent": {"rope_dim": 8},
}


def make_layer(
    name: str,
    dtype: str,
    block_size: int,
    *,
    window: int = 0,
    chunk: int = 0,
    rope_dim: int = 0,
    **extra: Any,
) -> AttentionLayer:
    num_kv_heads = 1 if rope_dim else 2
    shape: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": 32,
        "dtype": dtype,
    }
    spec: AttentionSpec = FullAttentionSpec(**shape)
    if window:
        spec = SlidingWindowSpec(window=window, **shape)
    if chunk:
        spec = ChunkedLocalSpec(chunk=chunk, **shape)
    if rope_dim:
        spec = MLAAttentionSpec(rope_dim=rope_dim, **shape)
    return AttentionLayer(
        name=name, num_heads=6, num_kv_heads=num_kv_heads, head_dim=32, scale=0.2, spec=spec, **extra
    )


def reference_backend() -> type[AttentionBackend]:
    plugins = load_plugins(quiet=True)
    device = DeviceDescriptor("cpu", 0, "", 0)
    return next(backend for backend in plugins.attention_backends(device) if backend.name == "reference")


class Requests:
    """Requests that come, grow by random amounts and go, drawing on a pool of blocks that are used again."""

    def __init__(self, seed: int, block_size: int) -> None:
        self._random = random.Random(seed)
        self._block_size = block_size
        self._free = self._random.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self._blocks: list[list[int]] = []
        self._lengths: list[int] = []

    def step(self) -> AttentionInputs | None:
        for index in reversed(range(len(self._blocks))):
            if self._random.random() < 0.15:
                self._free += self._blocks.pop(index)
                del self._lengths[index]
        if self._random.random() < 0.6:
            self._blocks.append([])
            self._lengths.append(0)
        query_lens = []
        for index, length in enumerate(self._lengths):
            grows = (
                1 if length and self._random.random() < 0.8 else self._random.randint(1, 3 * self._block_size)
            )
            room = (len(self._blocks[index]) + len(self._free)) * self._block_size - length
            grows = min(grows, room)
            if grows == 0:
                return None
            self._lengths[index] = length + grows
            while len(self._blocks[index]) * self._block_size < length + grows:
                self._blocks[index].append(self._free.pop())
            query_lens.append(grows)
        return self._inputs(query_lens) if query_lens else None

    def _inputs(self, query_lens: list[int]) -> AttentionInputs:
        width = max(map(len, self._blocks))
        table = torch.tensor(
            [blocks + [0] * (width - len(blocks)) for blocks in self._blocks], dtype=torch.int32
        )
        slots = [
            self._blocks[i][t // self._block_size] * self._block_size + t % self._block_size
            for i, grown in enumerate(query_lens)
            for t in range(self._lengths[i] - grown, self._lengths[i])
        ]
        starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
        return AttentionInputs(
            num_reqs=len(query_lens),
            num_tokens=sum(query_lens),
            query_lens_host=query_lens,
            seq_lens_host=list(self._lengths),
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(self._lengths, dtype=torch.int32),
            block_table=table,
            slot_mapping=torch.tensor(slots),
            block_size=self._block_size,
        )


@pytest.mark.parametrize(
    ("block_size", "seed"),
    [
        pytest.param(block_size, seed, marks=[pytest.mark.slow] if block_size == 32 and seed else [])
        for block_size in (4, 32)
        for seed in range(3)
    ],
)
@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_step_after_step(
    variant: str, dtype: str, block_size: int, backend_class: type[AttentionBackend], seed: int
) -> None:
    layers = [make_layer(name, dtype, block_size, **VARIANTS[variant]) for name in ("first", "second")]
    torch_dtype = getattr(torch, dtype)
    compare_steps(backend_class(), layers, torch_dtype, torch_dtype, seed)


@needs_native
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(("kv_dtype", "stored"), CODES.items())
def test_codes_step_after_step(kv_dtype: str, stored: torch.dtype, dtype: str, variant: str) -> None:
    layer = make_layer("l", kv_dtype, 16, **VARIANTS[variant])
    if kv_dtype.startswith("fp8"):
        scales = torch.tensor([0.5, 0.3])[: layer.num_kv_heads]
        layer = replace(layer, kv_scales=KVScales(scales, 3 * scales))
    compare_steps(CpuNativeAttention(), [layer], getattr(torch, dtype), stored, seed=1)


def compare_steps(
    backend: AttentionBackend,
    layers: list[AttentionLayer],
    torch_dtype: torch.dtype,
    stored: torch.dtype,
    seed: int,
) -> None:
    """With the reference, whose cache of the type ``stored`` has other bytes in its other places."""
    backends = [backend, reference_backend()()]
    kvs = {}
    for each, layer in itertools.product(backends, layers):
        kv = each.allocate_kv(layer, NUM_BLOCKS, stored, torch.device("cpu"))
        kv.view(torch.uint8).fill_(255)  # NaN in every type, that of an int8 row's scale included
        kvs[each.name, layer.name] = kv
    requests = Requests(seed, layers[0].spec.block_size)
    tolerance = TOLERANCES[str(torch_dtype).removeprefix("torch.")]
    generator = torch.Generator().manual_seed(seed)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0]) if layers[0].has_sinks else None
    num_steps = 0
    for _ in range(25):
        inputs = requests.step()
        if inputs is None:
            continue
        num_steps += 1
        metadata = [backend.build_metadata(inputs) for backend in backends]
        for layer in layers:
            qkv = torch.randn(inputs.num_tokens, 10, 32, generator=generator).to(torch_dtype)
            q, k, v = qkv.split([6, 2, 2], dim=1)
            if isinstance(layer.spec, MLAAttentionSpec):
                k = k[:, :1]
                v = k[..., : layer.spec.latent_rank]
            kept = qkv.clone()
            got, want = (
                backend.forward(layer, q, k, v, kvs[backend.name, layer.name], about, sinks=sinks)
                for backend, about in zip(backends, metadata)
            )
            assert got.dtype == torch_dtype
            assert got.shape == (*q.shape[:2], v.shape[-1])
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
            assert torch.equal(qkv, kept)
    assert num_steps > 10


@pytest.mark.parametrize("backend_class", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 16, 128])
@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("rope_dim", [0, 8])
def test_it_takes_the_bytes_that_its_spec_says(
    rope_dim: int, dtype: str, block_size: int, backend_class: type[AttentionBackend]
) -> None:
    layer = make_layer("l", dtype, block_size, rope_dim=rope_dim)
    kv = backend_class.allocate_kv(layer, 5, getattr(torch, dtype), torch.device("cpu"))
    assert kv.nbytes == 5 * layer.spec.block_bytes


@pytest.mark.parametrize("kv_dtype", CODES)
def test_codes_take_the_bytes_that_their_spec_says(kv_dtype: str) -> None:
    layer = make_layer("l", kv_dtype, 16)
    kv = CpuNativeAttention.allocate_kv(layer, 5, CODES[kv_dtype], torch.device("cpu"))
    assert kv.nbytes == 5 * layer.spec.block_bytes


@pytest.mark.parametrize("backend_class", BACKENDS)
def test_what_it_does_not_do(backend_class: type[AttentionBackend]) -> None:
    layer = make_layer("l", "float32", 16)
    half = torch.bfloat16

    def reason(layer: AttentionLayer, dtype: torch.dtype = half, kv_dtype: torch.dtype = half) -> str | None:
        device = DeviceDescriptor("cpu", 0, "", 0)
        return backend_class.unsupported_reason(
            AttentionQuery(layer=layer, dtype=dtype, kv_dtype=kv_dtype, device=device)
        )

    assert reason(layer) is None
    assert "not in torch.float64" in (reason(layer, dtype=torch.float64) or "")
    assert "torch.bfloat16" in (reason(layer, kv_dtype=torch.float32) or "")
    reads_codes = backend_class is CpuNativeAttention
    for stored in CODES.values():
        assert reads_codes == (reason(layer, kv_dtype=stored) is None)
    assert "not of KVCacheSpec" in (reason(replace(layer, spec=KVCacheSpec(block_size=16))) or "")
    assert reason(replace(layer, soft_cap=30.0, has_sinks=True)) is None


def test_without_the_native_library_torch_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "unavailable_reason", lambda: "there is none")
    device = DeviceDescriptor("cpu", 0, "", 0)
    query = AttentionQuery(
        layer=make_layer("l", "float32", 16), dtype=torch.float32, kv_dtype=torch.float32, device=device
    )
    assert load_plugins(quiet=True).choose_attention(query).name == "cpu_paged"
