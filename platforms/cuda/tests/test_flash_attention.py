"""FlashAttention against the reference backend on the same steps, on a GPU."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_parity import HALF, HEAD_DIM, NUM_HEADS, STEPS, compare, make_layer, reason_of, with_window
from attention_steps import ragged_inputs
from inferplane_cuda.attention import CudaTritonAttention
from inferplane_cuda.flash_attention import FlashAttention
from inferplane_cuda.flash_library import _imported


@pytest.fixture
def flash(gpu: torch.device) -> FlashAttention:
    pytest.importorskip("flash_attn.cute")
    return FlashAttention()


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("dtype", HALF)
def test_it_is_the_reference(
    dtype: torch.dtype, block_size: int, step: str, flash: FlashAttention, gpu: torch.device
) -> None:
    compare(flash, make_layer(dtype, block_size), dtype, step, gpu, takes_nan=False)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["window", "soft cap", "sinks"])
@pytest.mark.parametrize("step", ["decode", "mixed"])
def test_variants(step: str, variant: str, flash: FlashAttention, gpu: torch.device) -> None:
    layer, sinks = make_layer(torch.bfloat16, 16), None
    if variant == "window":
        layer = with_window(layer, 7)
    elif variant == "soft cap":
        layer = replace(layer, soft_cap=3.0)
    else:
        layer = replace(layer, has_sinks=True)
        sinks = torch.randn(NUM_HEADS, generator=torch.Generator().manual_seed(1)).to(gpu)
    compare(flash, layer, torch.bfloat16, step, gpu, sinks, takes_nan=False)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_what_earlier_kernels_left_in_shared_memory_is_not_seen(
    block_size: int, flash: FlashAttention, gpu: torch.device
) -> None:
    """A tile reaches beyond a sequence's keys, and what is there times a weight of 0 must be 0."""
    layer, dtype = make_layer(torch.bfloat16, block_size), torch.bfloat16
    compare(flash, layer, dtype, "prefill", gpu, takes_nan=False)  # compiled from here on
    poison = torch.full((4096, 4096), math.nan, dtype=dtype, device=gpu)
    for _ in range(3):
        poison @ poison
    compare(flash, layer, dtype, "prefill", gpu, takes_nan=False)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    **more: object,
) -> torch.Tensor:
    """What `flash_attn_varlen_func` computes of plain causal attention; rows of no request are NaN."""
    out = torch.full_like(q, math.nan)
    for (begin, end), length, pages in zip(pairwise(cu_seqlens_q.tolist()), seqused_k.tolist(), page_table):
        assert end - begin <= max_seqlen_q and length <= max_seqlen_k
        keys, values = (each[pages].flatten(0, 1)[:length].transpose(0, 1) for each in (k, v))
        mask = torch.ones(end - begin, length, dtype=torch.bool).tril_(length - (end - begin))
        part = scaled_dot_product_attention(
            q[begin:end].transpose(0, 1), keys, values, mask, scale=softmax_scale, enable_gqa=True
        )
        out[begin:end] = part.transpose(0, 1)
    return out


@pytest.mark.parametrize("step", ["prefill", "chunks", "mixed"])
def test_what_it_gives_the_library(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, by a stand-in. Of a mixed step it gets the prompts alone, and all rows are filled in."""
    sizes: list[int] = []

    def attend(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        sizes.append(len(options["page_table"]))
        return paged_attention(q, *args, **options)

    monkeypatch.setattr("inferplane_cuda.flash_library._imported", lambda: attend)
    host = torch.device("cpu")
    compare(FlashAttention(), make_layer(torch.float32, 16), torch.float32, step, host, takes_nan=False)
    assert sizes[-1] == 3


def test_many_prompts_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*args: Any, **options: Any) -> torch.Tensor:
        raise AssertionError("called")

    monkeypatch.setattr("inferplane_cuda.flash_library._imported", lambda: attend)
    monkeypatch.setattr("inferplane_cuda.flash_attention.MAX_REQUESTS", 2)
    host = torch.device("cpu")
    compare(FlashAttention(), make_layer(torch.float32, 16), torch.float32, "chunks", host, takes_nan=False)


def test_what_flash_attention_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, half = make_layer(torch.bfloat16, 16), torch.bfloat16
    assert "not in torch.float32" in reason_of(FlashAttention, layer)
    assert "a GPU lacks bulk_tensor_copy" in reason_of(FlashAttention, layer, half)
    assert "multiples of 8" in reason_of(
        FlashAttention, replace(layer, head_dim=36), half, "bulk_tensor_copy"
    )
    monkeypatch.setattr("inferplane_cuda.cute_packages._is_there", lambda module: False)
    assert "not installed" in reason_of(FlashAttention, layer, half, "bulk_tensor_copy")
    monkeypatch.setattr("inferplane_cuda.cute_packages._is_there", lambda module: True)
    assert not reason_of(FlashAttention, layer, half, "bulk_tensor_copy")


def test_both_packages_are_needed_and_neither_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("flash_attn", "cutlass"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')")
    layer = make_layer(torch.float16, 16)
    for name, part in (("flash-attn-4", "flash_attn/cute.py"), ("nvidia-cutlass-dsl", "cutlass/cute.py")):
        got = reason_of(FlashAttention, layer, torch.float16, "bulk_tensor_copy")
        assert got == f"the package {name} is not installed"
        (tmp_path / part).touch()
        importlib.invalidate_caches()
    assert not reason_of(FlashAttention, layer, torch.float16, "bulk_tensor_copy")


def test_flash_attention_that_cannot_be_imported_leaves_prompts_to_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, device: torch.device
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    (tmp_path / "flash_attn" / "cute.py").write_text("raise OSError('libfoo.so is missing')")
    for module in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, module)
    _imported.cache_clear()
    try:
        layer = make_layer(torch.float32, 16)
        inputs = ragged_inputs([0], [5], block_size=16, num_blocks=2, device=device)
        q, k, v = torch.randn(5, 10, HEAD_DIM).to(device).split([6, 2, 2], dim=1)
        outs = []
        for backend in (FlashAttention(), FlashAttention(), CudaTritonAttention()):
            kv = backend.allocate_kv(layer, 2, torch.float32, device)
            outs.append(backend.forward(layer, q, k, v, kv, backend.build_metadata(inputs)))
        assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[2])
        assert "OSError: libfoo.so is missing" in caplog.text
        assert len(caplog.records) == 1
    finally:
        _imported.cache_clear()
