"""The reference platform: found like a plugin, and right by a computation that shares no code with it."""

from __future__ import annotations

import math

import pytest
import torch

from inferplane.api.attention import AttentionInputs, AttentionLayer
from inferplane.api.kv import FullAttentionSpec
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


def test_its_attention_by_hand() -> None:
    """Two requests in one step: a decode and the second part of a prompt, in blocks out of order, NaN all around."""
    spec = FullAttentionSpec(block_size=2, num_kv_heads=1, head_dim=2, dtype="float32")
    layer = AttentionLayer(name="layer", num_heads=2, num_kv_heads=1, head_dim=2, scale=0.5, spec=spec)
    kv = ReferenceAttention.allocate_kv(layer, 6, torch.float32, torch.device("cpu"))
    assert kv.numel() * kv.element_size() == 6 * spec.block_bytes
    kv.fill_(math.nan)
    generator = torch.Generator().manual_seed(0)
    keys = [torch.randn(length, 2, generator=generator) for length in (3, 5)]
    values = [torch.randn(length, 2, generator=generator) for length in (3, 5)]
    table = torch.tensor([[4, 1, 0], [0, 5, 2]], dtype=torch.int32)
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
        return backend.forward(layer, q, k, v, kv, backend.build_metadata(inputs))

    step([(0, 2), (0, 2)], torch.randn(4, 2, 2, generator=generator))
    q = torch.randn(4, 2, 2, generator=generator)
    got = step([(2, 3), (2, 5)], q)

    positions = [(0, 2), (1, 2), (1, 3), (1, 4)]
    for row, (request, position) in enumerate(positions):
        for head in range(2):
            scores = [0.5 * float(q[row, head] @ keys[request][t]) for t in range(position + 1)]
            weights = [math.exp(score) for score in scores]
            want = sum(w / sum(weights) * values[request][t] for t, w in enumerate(weights))
            torch.testing.assert_close(got[row, head], want)
