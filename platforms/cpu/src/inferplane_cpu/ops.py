"""Ops for which the CPU kernels beat the reference: native ones, and torch's own for machines without the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inferplane.api.ops import OpImpl, OpQuery
from inferplane_cpu.sampling import SAMPLING_OPS
from inferplane_kernels_cpu import native
from inferplane_kernels_cpu import ops as torch_ops
from inferplane_kernels_cpu.causal_attention import causal_attention
from inferplane_kernels_cpu.native_experts import fused_experts
from inferplane_kernels_cpu.native_ops import DTYPES, native_ops

PROVIDER = "inferplane-kernels-cpu"
TORCH_PROVIDER = f"{PROVIDER} (torch)"


def _native_reason(query: OpQuery) -> str | None:
    if (reason := native.unavailable_reason()) is not None:
        return reason
    if query.dtype not in DTYPES:
        return f"computes in {', '.join(map(str, DTYPES))}, not in {query.dtype}"
    return None


def _native_implementations() -> list[OpImpl]:
    if native.unavailable_reason() is not None:
        return []
    ops = native_ops()
    functions: dict[str, Callable[..., Any]] = {
        "rms_norm": ops.rms_norm,
        "add_rms_norm": ops.add_rms_norm,
        "rotary": ops.rotary,
        "silu_and_mul": ops.silu_and_mul,
        "gelu_tanh_and_mul": ops.gelu_tanh_and_mul,
        "fused_experts": fused_experts,
        "causal_attention": causal_attention,
    }
    return [OpImpl(op, fn, PROVIDER, _native_reason, priority=20) for op, fn in functions.items()]


OP_IMPLEMENTATIONS: list[OpImpl] = [
    *_native_implementations(),
    *SAMPLING_OPS,
    OpImpl("rms_norm", torch_ops.rms_norm, TORCH_PROVIDER, priority=10),
    OpImpl("add_rms_norm", torch_ops.add_rms_norm, TORCH_PROVIDER, priority=10),
    OpImpl("rotary", torch_ops.rotary, TORCH_PROVIDER, priority=10),
    OpImpl("silu_and_mul", torch_ops.silu_and_mul, TORCH_PROVIDER, priority=10),
]
