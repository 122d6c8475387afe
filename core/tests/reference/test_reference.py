"""The reference platform: found like a plugin, and right by a computation that shares no code with it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from inferplane.api.attention import AttentionInputs, AttentionLayer
from inferplane.api.kv import (
    AttentionSpec,
    ChunkedLocalSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from inferplane.api.kv_dtype import KVScales
from inferplane.api.linear import LinearShape
from inferplane.config import EngineArgs
from inferplane.plugins import PluginError, load_plugins
from inferplane.reference.attention import ReferenceAttention


def test_it_serves_the_host() -> None:
    plugins = load_plugins(quiet=True)
    device = plugins.select_device("reference")
    assert device.total_memory_bytes > 0
    platform = plugins.platform(device)
    defaults = platform.config_defaults(EngineArgs(), device, "bfloat16")
    assert defaults["dtype"] == "float32"
    assert {"dtype", "block_size", "max_num_seqs", "max_num_batched_tokens"} <= defaults.keys()
    runtime = platform.device_runtime(device)
    assert 0 < runtime.memory().available_bytes <= runtime.memory().total_bytes
    host = torch.arange(3)
    assert torch.equal(runtime.to_host(runtime.to_device(host)), host)


def test_its_linear_kernel() -> None:
    plugins = load_plugins(quiet=True)
    device = plugins.select_device("reference")
    shape = LinearShape("test", 5, 3, torch.float32, has_bias=True)
    kernel = plugins.choose_linear(shape, device)
    weight, bias = torch.randn(3, 5), torch.randn(3)
    x = torch.randn(4, 5)
    want = [
        [sum(float(a) * float(b) for a, b in zip(row, w)) + float(c) for w, c in zip(weight, bias)]
        for row in x
    ]
    torch.testing.assert_close(kernel.prepare(weight, bias)(x), torch.tensor(want))
    with pytest.raises(PluginError, match="float weights only"):
        plugins.choose_linear(LinearShape("test", 5, 3, torch.int8, has_bias=False), device)


def sees_all(query: int, key: int) -> bool:
    return True


def is_within_3(query: int, key: int) -> bool:
    return query - key < 3


def is_in_its_chunk_of_3(query: int, key: int) -> bool:
    return query // 3 == key // 3


@pytest.mark.parametrize("sinks", [None, (0.5, -1.0)])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize(
    ("spec_class", "extra", "sees", "lost_block"),
    [
        (FullAttentionSpec, {}, sees_all, None),
        (SlidingWindowSpec, {"window": 3}, is_within_3, None),
        (ChunkedLocalSpec, {"chunk": 3}, is_in_its_chunk_of_3, 0),
    ],
)
def test_its_attention_by_hand(
    spec_class: type[AttentionSpec],
    extra: dict[str, int],
    sees: Callable[[int, int], bool],
    lost_block: int | None,
    soft_cap: float | None,
    sinks: tuple[float, float] | None,
) -> None:
    """Two requests in one step: a decode and the second part of a prompt, in blocks out of order, NaN all around."""
    spec = spec_class(block_size=2, num_kv_heads=1, head_dim=2, dtype="float32", **extra)
    layer = AttentionLayer(
        name="layer",
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        scale=0.5,
        spec=spec,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
    )
    kv = ReferenceAttention.allocate_kv(layer, 7, torch.float32, torch.device("cpu"))
    assert kv.numel() * kv.element_size() == 7 * spec.block_bytes
    kv.fill_(math.nan)
    generator = torch.Generator().manual_seed(0)
    lengths = (4, 7)
    keys = [torch.randn(length, 2, generator=generator) for length in lengths]
    values = [torch.randn(length, 2, generator=generator) for length in lengths]
    table = torch.tensor([[4, 1, 0, 0], [0, 5, 2, 6]], dtype=torch.int32)
    backend = ReferenceAttention()

    def step(spans: list[tuple[int, int]], q: torch.Tensor) -> torch.Tensor:
        slots = [
            int(table[i, t // 2]) * 2 + t % 2
            for i, (start, end) in enumerate(spans)
            for t in range(start, end)
        ]
        lens = [end - start for start, end in spans]
        ends = [end for _, end in spans]
        inputs = AttentionInputs(
            num_reqs=2,
            num_tokens=sum(lens),
            query_lens_host=lens,
            seq_lens_host=ends,
            query_start=torch.tensor([0, lens[0], sum(lens)], dtype=torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            block_table=table,
            slot_mapping=torch.tensor(slots),
            block_size=2,
        )
        k = torch.cat([keys[i][start:end] for i, (start, end) in enumerate(spans)]).unsqueeze(1)
        v = torch.cat([values[i][start:end] for i, (start, end) in enumerate(spans)]).unsqueeze(1)
        of_heads = None if sinks is None else torch.tensor(sinks)
        return backend.forward(layer, q, k, v, kv, backend.build_metadata(inputs), sinks=of_heads)

    step([(0, 3), (0, 4)], torch.randn(7, 2, 2, generator=generator))
    if lost_block is not None:  # which no token sees any more
        kv[:, table[1, lost_block]] = math.nan
    q = torch.randn(4, 2, 2, generator=generator)
    got = step([(3, 4), (4, 7)], q)

    positions = [(0, 3), (1, 4), (1, 5), (1, 6)]
    for row, (request, position) in enumerate(positions):
        seen = [t for t in range(position + 1) if sees(position, t)]
        for head in range(2):
            scores = [0.5 * float(q[row, head] @ keys[request][t]) for t in seen]
            if soft_cap is not None:
                scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
            weights = [math.exp(score) for score in scores]
            total = sum(weights) + (0.0 if sinks is None else math.exp(sinks[head]))
            want = sum(w / total * values[request][t] for t, w in zip(seen, weights))
            torch.testing.assert_close(got[row, head], want)


def test_fp8_keys_and_values_have_scales_of_their_own() -> None:
    """Of numbers that fp8 holds exactly under their own scale only, so that attention is the plain one."""
    k_scales, v_scales = torch.tensor([3.0, 0.1]), torch.tensor([0.3, 7.0])
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_dim=4, dtype="fp8_e4m3")
    layer = AttentionLayer(
        name="layer",
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        scale=0.05,
        spec=spec,
        kv_scales=KVScales(k_scales, v_scales),
    )
    generator = torch.Generator().manual_seed(0)
    k, v = (
        torch.randint(-8, 9, (4, 2, 4), generator=generator) * scales.view(1, 2, 1)
        for scales in (k_scales, v_scales)
    )
    q = torch.randn(4, 2, 4, generator=generator)
    inputs = AttentionInputs(
        num_reqs=1,
        num_tokens=4,
        query_lens_host=[4],
        seq_lens_host=[4],
        query_start=torch.tensor([0, 4], dtype=torch.int32),
        seq_lens=torch.tensor([4], dtype=torch.int32),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.arange(4, 8),
        block_size=4,
    )
    kv = ReferenceAttention.allocate_kv(layer, 2, torch.float8_e4m3fn, torch.device("cpu"))
    backend = ReferenceAttention()
    got = backend.forward(layer, q, k, v, kv, backend.build_metadata(inputs))
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, scale=layer.scale)
    torch.testing.assert_close(got, want.transpose(0, 1))


def test_a_latent_is_key_and_value_of_every_head() -> None:
    spec = MLAAttentionSpec(block_size=2, head_dim=5, rope_dim=2, dtype="float32")
    layer = AttentionLayer(name="layer", num_heads=2, num_kv_heads=1, head_dim=5, scale=0.5, spec=spec)
    kv = ReferenceAttention.allocate_kv(layer, 4, torch.float32, torch.device("cpu")).fill_(math.nan)
    assert kv.nbytes == 4 * spec.block_bytes == 4 * 2 * 5 * 4
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(5, 2, 5, generator=generator), torch.randn(5, 1, 5, generator=generator)
    backend, parts = ReferenceAttention(), []
    for start, end in [(0, 3), (3, 4), (4, 5)]:
        inputs = AttentionInputs(
            num_reqs=1,
            num_tokens=end - start,
            query_lens_host=[end - start],
            seq_lens_host=[end],
            query_start=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_table=torch.tensor([[3, 0, 2]], dtype=torch.int32),
            slot_mapping=torch.tensor([[6, 7, 0, 1, 4][t] for t in range(start, end)]),
            block_size=2,
        )
        rows = slice(start, end)
        v = k[rows, :, : spec.latent_rank]
        parts.append(backend.forward(layer, q[rows], k[rows], v, kv, backend.build_metadata(inputs)))
    got = torch.cat(parts)
    assert got.shape == (5, 2, 3)
    for token in range(5):
        for head in range(2):
            weights = [math.exp(0.5 * float(q[token, head] @ k[t, 0])) for t in range(token + 1)]
            want = sum(w / sum(weights) * k[t, 0, :3] for t, w in enumerate(weights))
            torch.testing.assert_close(got[token, head], want)
