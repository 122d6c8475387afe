"""FlashAttention against the reference backend on the same steps, on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_parity import HALF, NUM_HEADS, STEPS, compare, make_layer, reason_of, with_window
from inferplane_cuda.flash_attention import FlashAttention


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
    monkeypatch.setattr("inferplane_cuda.flash_attention._is_installed", lambda: False)
    assert "not installed" in reason_of(FlashAttention, layer, half, "bulk_tensor_copy")
    monkeypatch.setattr("inferplane_cuda.flash_attention._is_installed", lambda: True)
    assert not reason_of(FlashAttention, layer, half, "bulk_tensor_copy")
