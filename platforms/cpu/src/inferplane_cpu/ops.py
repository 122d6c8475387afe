"""Ops for which the CPU kernels beat the reference."""

from __future__ import annotations

from inferplane.api.ops import OpImpl, OpQuery
from inferplane_kernels_cpu import native
from inferplane_kernels_cpu import ops as kernels
from inferplane_kernels_cpu.best_token import DTYPES, best_token

PROVIDER = "inferplane-kernels-cpu"


def _best_token_reason(query: OpQuery) -> str | None:
    if query.dtype not in DTYPES:
        return f"takes logits in {', '.join(map(str, DTYPES))}, not {query.dtype}"
    return native.unavailable_reason()


OP_IMPLEMENTATIONS: list[OpImpl] = [
    OpImpl("rms_norm", kernels.rms_norm, PROVIDER, priority=10),
    OpImpl("add_rms_norm", kernels.add_rms_norm, PROVIDER, priority=10),
    OpImpl("rotary", kernels.rotary, PROVIDER, priority=10),
    OpImpl("silu_and_mul", kernels.silu_and_mul, PROVIDER, priority=10),
    OpImpl("best_token", best_token, PROVIDER, _best_token_reason, priority=10),
]
