"""The backends of this platform, with AITER played by torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_parity import STEPS, compare, make_layer, with_window
from inferplane.api.attention import AttentionQuery
from inferplane_rocm import aiter_attention, aiter_package
from inferplane_rocm.aiter_attention import AiterAttention
from inferplane_rocm.attention import RocmTritonAttention
from inferplane_rocm.probing import describe
from inferplane_rocm.topology import Gpu

MI300 = describe(Gpu("", "gfx942", 304, 64, 192 << 30), 0)
RADEON = describe(Gpu("", "gfx1100", 96, 32, 24 << 30), 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Puts a library in AITER's place that has its signature; the number of sequences of each call."""
    numbers: list[int] = []

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
    ) -> torch.Tensor:
        starts = cu_seqlens_q.tolist()
        assert causal and starts == cu_seqlens_k.tolist()
        numbers.append(len(starts) - 1)
        outs = []
        for begin, end in pairwise(starts):
            assert end - begin <= max_seqlen_q == max_seqlen_k
            heads: list[Any] = [each[begin:end].transpose(0, 1) for each in (q, k, v)]
            out = scaled_dot_product_attention(*heads, is_causal=True, scale=softmax_scale, enable_gqa=True)
            outs.append(out.transpose(0, 1))
        return torch.cat(outs)

    library: Any = ModuleType("aiter")
    library.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "aiter", library)
    return numbers


@pytest.mark.parametrize("step", ["prefill", "mixed"])
def test_aiter_has_the_steps_in_which_prompts_begin(
    step: str, calls: list[int], device: torch.device
) -> None:
    compare(AiterAttention(), make_layer(torch.float32, 16), torch.float32, step, device)
    assert calls == [len(STEPS[step][0])]  # of "mixed" it is the step before, in which all requests begin


def test_decoding_is_tritons(calls: list[int], device: torch.device) -> None:
    compare(RocmTritonAttention(), make_layer(torch.float32, 16), torch.float32, "decode", device)
    assert not calls


def why_not(dtype: torch.dtype = torch.bfloat16, device: Any = MI300, **more: Any) -> str:
    layer = replace(make_layer(dtype, 16), **{"head_dim": 128, **more})
    query = AttentionQuery(layer=layer, dtype=dtype, kv_dtype=dtype, device=device)
    return AiterAttention.unsupported_reason(query) or ""


def test_what_aiter_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not() == "the package amd-aiter is not installed"
    monkeypatch.setattr(aiter_attention, "why_no_aiter", lambda: None)
    assert why_not() == ""
    assert "not in torch.float32" in why_not(torch.float32)
    assert "lacks wave64" in why_not(device=RADEON)
    assert "not for 96" in why_not(head_dim=96)
    assert "plain causal attention only" in why_not(soft_cap=30.0)
    assert "plain causal attention only" in why_not(has_sinks=True)
    assert "plain causal attention only" in why_not(spec=with_window(make_layer(torch.float32, 16), 8).spec)


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ("0.1.7.post2.dev18", None),
        ("0.1.5", None),
        ("0.1.4", "amd-aiter 0.1.4 is installed; at least 0.1.5 is needed"),
    ],
)
def test_its_version(monkeypatch: pytest.MonkeyPatch, installed: str, reason: str | None) -> None:
    monkeypatch.setattr(aiter_package, "version", lambda name: installed)
    assert aiter_package.why_no_aiter() == reason
