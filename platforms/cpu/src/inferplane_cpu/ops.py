"""Ops for which the CPU kernels beat the reference."""

from __future__ import annotations

from inferplane.api.ops import OpImpl
from inferplane_cpu.sampling import SAMPLING_OPS
from inferplane_kernels_cpu import ops as kernels

PROVIDER = "inferplane-kernels-cpu"

OP_IMPLEMENTATIONS: list[OpImpl] = [
    OpImpl("rms_norm", kernels.rms_norm, PROVIDER, priority=10),
    OpImpl("add_rms_norm", kernels.add_rms_norm, PROVIDER, priority=10),
    OpImpl("rotary", kernels.rotary, PROVIDER, priority=10),
    OpImpl("silu_and_mul", kernels.silu_and_mul, PROVIDER, priority=10),
    *SAMPLING_OPS,
]
