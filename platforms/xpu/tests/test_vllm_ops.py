"""The optional ops, with a library in their place that registers the same schemas with torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from inferplane.api import DeviceDescriptor
from inferplane.api import ops as reference
from inferplane.api.ops import OPS, OpQuery
from inferplane_xpu import vllm_ops
from inferplane_xpu.vllm_ops import OP_IMPLEMENTATIONS, unsupported_reason, why_no_vllm_ops


@pytest.fixture
def library() -> Iterator[None]:
    made = torch.library.Library("_C", "FRAGMENT")
    made.define("rms_norm(Tensor! out, Tensor input, Tensor weight, float epsilon) -> ()")
    made.define("fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()")
    made.define("silu_and_mul(Tensor! out, Tensor input) -> ()")

    def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        assert x.is_contiguous()
        out.copy_(reference.rms_norm(x, weight, eps))

    def fused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        assert x.is_contiguous() and residual.is_contiguous()
        residual.add_(x)
        x.copy_(reference.rms_norm(residual, weight, eps))

    def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
        out.copy_(reference.silu_and_mul(x))

    for name, fn in (("rms_norm", rms_norm), ("fused_add_rms_norm", fused), ("silu_and_mul", silu_and_mul)):
        made.impl(name, fn, "CPU")
    yield
    made._destroy()


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    why_no_vllm_ops.cache_clear()
    yield
    why_no_vllm_ops.cache_clear()


@pytest.mark.parametrize("each", OP_IMPLEMENTATIONS, ids=lambda each: each.op)
def test_they_are_called_as_the_ops_say(each, library: None) -> None:
    op = OPS[each.op]
    inputs = op.example_inputs(torch.Generator().manual_seed(0), torch.float32)
    want = op.reference(*(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs))
    torch.testing.assert_close(each.fn(*inputs), want)


def test_rows_may_be_apart(library: None) -> None:
    x = torch.randn(4, 3, 32)[:, 1]
    weight = torch.randn(32)
    torch.testing.assert_close(vllm_ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_why_they_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    query = OpQuery(device=DeviceDescriptor("xpu", 0, "", 0), dtype=torch.bfloat16)
    assert unsupported_reason(query) == "the package vllm-xpu-kernels is not installed"
    wide = OpQuery(device=query.device, dtype=torch.float64)
    assert "not in torch.float64" in (unsupported_reason(wide) or "")
    why_no_vllm_ops.cache_clear()
    monkeypatch.setattr(vllm_ops, "version", lambda name: "0.0.9")
    assert "at least 0.1 is needed" in (unsupported_reason(query) or "")
    why_no_vllm_ops.cache_clear()
    monkeypatch.setattr(vllm_ops, "version", lambda name: "0.1.4")
    assert "does not load beside torch" in (unsupported_reason(query) or "")
