"""One kernel for each kind of layer, compiled before it is needed and kept on disk."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_parity import HALF, NUM_HEADS, make_layer, with_window
from attention_steps import ragged_inputs
from inferplane.api import CapabilitySet, DeviceDescriptor
from inferplane.api.attention import AttentionLayer, AttentionQuery
from inferplane_cuda import cute_compiling, flash_library
from inferplane_cuda.flash_attention import FlashAttention
from inferplane_cuda.flash_library import CACHE_DIR, CACHE_ENABLED, Variant

BF16 = torch.bfloat16
HOST = torch.device("cpu")
LAYERS = {
    "plain": make_layer(BF16, 16),
    "window": with_window(make_layer(BF16, 128), 7),
    "cap": replace(make_layer(BF16, 64), soft_cap=3.0),
    "sinks": replace(make_layer(BF16, 16), has_sinks=True),
}


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_compiling, "_compiling", {})


def query_of(layer: AttentionLayer, dtype: torch.dtype = BF16) -> AttentionQuery:
    device = DeviceDescriptor("acme", 0, "a GPU", 0, CapabilitySet())
    return AttentionQuery(layer=layer, dtype=dtype, kv_dtype=dtype, device=device)


def prefill(layer: AttentionLayer, lengths: list[int], device: torch.device) -> None:
    """Prompts of these lengths, without a context."""
    dtype: torch.dtype = getattr(torch, layer.spec.dtype)
    num_blocks = len(lengths) * -(-max(lengths) // layer.spec.block_size)
    inputs = ragged_inputs(
        [0] * len(lengths),
        lengths,
        block_size=layer.spec.block_size,
        num_blocks=num_blocks,
        device=device,
    )
    backend = FlashAttention()
    q = torch.randn(sum(lengths), NUM_HEADS, layer.head_dim).to(device, dtype)
    kv = backend.allocate_kv(layer, num_blocks, dtype, device)
    sinks = torch.zeros(NUM_HEADS, device=device) if layer.has_sinks else None
    backend._prefill(layer, q, kv, backend.build_metadata(inputs).prompts, sinks)


def kind_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[object, ...]:
    """What the library tells kernels apart by, of what differs between our calls."""
    group_size = q.shape[1] // k.shape[2]
    sinks = options["learnable_sink"]
    return (
        (q.dtype, q.shape[1:], k.shape[1:], v.shape[1:]),
        [each is None for each in options["window_size"]],
        (options["causal"], options["softcap"], sinks is None or sinks.dtype),
        options["max_seqlen_q"] * group_size > 192,
        len(options["page_table"]) > 256,
        sorted(options),
    )


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_what_is_compiled_ahead_is_what_steps_call(
    layer: AttentionLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []

    def attend(*args: torch.Tensor, **options: Any) -> torch.Tensor:
        kinds.append(kind_of(*args, **options))
        return args[0]

    monkeypatch.setattr(flash_library, "_imported", lambda: attend)
    Variant.of(query_of(layer)).call(attend, HOST)
    for lengths in ([7], [2, 40, 3], [300]):
        prefill(layer, lengths, HOST)
    assert len(kinds) == 4 and all(kind == kinds[0] for kind in kinds)


def test_layers_of_one_kind_are_compiled_once_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, compiled = threading.Event(), []

    def launch(variant: Variant, device: torch.device) -> None:
        assert may_end.wait(10)
        compiled.append(variant)
        raise RuntimeError("no memory")

    monkeypatch.setattr(flash_library, "_launch", launch)
    monkeypatch.setattr(flash_library, "_imported", lambda: compiled.copy)
    layer = LAYERS["plain"]
    for name in ("a", "b"):
        flash_library.start_compiling(Variant.of(query_of(replace(layer, name=name))), HOST)
    flash_library.start_compiling(Variant.of(query_of(LAYERS["cap"])), HOST)
    assert not compiled
    threading.Timer(0.05, may_end.set).start()
    attend = flash_library.attend()
    assert attend is not None and [each.soft_cap for each in attend()] == [None, 3.0]


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("dtype", HALF)
def test_no_prompt_is_compiled_for_again(dtype: torch.dtype, block_size: int, gpu: torch.device) -> None:
    interface = pytest.importorskip("flash_attn.cute.interface")
    layer = make_layer(dtype, block_size)
    FlashAttention.start_compiling(query_of(layer, dtype))
    assert flash_library.attend() is not None
    kernels = set(interface._flash_attn_fwd.compile_cache.cache)
    for lengths in ([7], [2, 40, 3], [1500, 200], [2] * 256, [3] * 257):
        prefill(layer, lengths, gpu)
    assert set(interface._flash_attn_fwd.compile_cache.cache) == kernels


def test_where_compiled_kernels_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (CACHE_ENABLED, CACHE_DIR):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    flash_library._keep_on_disk()
    assert CACHE_ENABLED not in os.environ
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(CACHE_ENABLED, "0")
    flash_library._keep_on_disk()
    assert CACHE_DIR not in os.environ
    monkeypatch.delenv(CACHE_ENABLED)
    flash_library._keep_on_disk()
    folder = tmp_path / "inferplane" / "flash-attention"
    assert (os.environ[CACHE_ENABLED], os.environ[CACHE_DIR]) == ("1", str(folder))
    assert folder.is_dir() and folder.stat().st_mode & 0o77 == 0
