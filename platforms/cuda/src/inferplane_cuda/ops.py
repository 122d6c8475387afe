"""Ops for which the Triton kernels beat the reference."""

from __future__ import annotations

from functools import partial

from inferplane.api.ops import OpImpl
from inferplane_cuda.launch import DEPENDENT_LAUNCH
from inferplane_kernels_triton.activation import silu_and_mul
from inferplane_kernels_triton.norm import add_rms_norm, rms_norm
from inferplane_kernels_triton.rotary import rotary

PROVIDER = "inferplane-kernels-triton"

OP_IMPLEMENTATIONS: list[OpImpl] = [
    OpImpl(fn.__name__, partial(fn, pdl=DEPENDENT_LAUNCH), PROVIDER, priority=10)
    for fn in (rms_norm, add_rms_norm, rotary, silu_and_mul)
]
