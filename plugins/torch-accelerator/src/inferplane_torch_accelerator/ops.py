"""Ops for which the Triton kernels beat the reference."""

from __future__ import annotations

from functools import partial

from inferplane.api.ops import OpImpl
from inferplane_torch_accelerator.launch import Launch, why_no_triton

PROVIDER = "inferplane-kernels-triton"


def triton_ops(launch: Launch) -> list[OpImpl]:
    """What a platform offers of the portable kernels; nothing where there is no triton."""
    if why_no_triton():
        return []
    from inferplane_kernels_triton.activation import silu_and_mul
    from inferplane_kernels_triton.norm import add_rms_norm, rms_norm
    from inferplane_kernels_triton.rotary import rotary

    return [
        OpImpl(fn.__name__, partial(fn, pdl=launch.pdl), PROVIDER, priority=10)
        for fn in (rms_norm, add_rms_norm, rotary, silu_and_mul)
    ]
