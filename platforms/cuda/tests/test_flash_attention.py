"""FlashAttention against the reference backend on the same steps, on a GPU."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_parity import HALF, HEAD_DIM, NUM_HEADS, STEPS, compare, make_layer, reason_of, with_window
from attention_steps import ragged_inputs
from inferplane_cuda.attention import CudaTritonAttention
from inferplane_cuda.flash_attention import FlashAttention, _imported


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


def test_what_flash_attention_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, half = make_layer(torch.bfloat16, 16), torch.bfloat16
    assert "not in torch.float32" in reason_of(FlashAttention, layer)
    assert "a GPU lacks bulk_tensor_copy" in reason_of(FlashAttention, layer, half)
    assert "multiples of 8" in reason_of(
        FlashAttention, replace(layer, head_dim=36), half, "bulk_tensor_copy"
    )
    monkeypatch.setattr("inferplane_cuda.flash_attention._is_there", lambda module: False)
    assert "not installed" in reason_of(FlashAttention, layer, half, "bulk_tensor_copy")
    monkeypatch.setattr("inferplane_cuda.flash_attention._is_there", lambda module: True)
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
