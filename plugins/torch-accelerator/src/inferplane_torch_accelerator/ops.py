"""Ops for which the Triton kernels beat the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from inferplane.api.ops import OpImpl
from inferplane_torch_accelerator.launch import Launch

PROVIDER = "inferplane-kernels-triton"


def triton_ops(launch: Launch) -> list[OpImpl]:
    """What a platform offers of the portable kernels; nothing where there is no triton for it."""
    if launch.why_not():
        return []
    from inferplane_kernels_triton.activation import silu_and_mul
    from inferplane_kernels_triton.best_token import best_token
    from inferplane_kernels_triton.encoder_attention import encoder_attention
    from inferplane_kernels_triton.moe_routing import topk_softmax
    from inferplane_kernels_triton.norm import add_rms_norm, rms_norm
    from inferplane_kernels_triton.rotary import rotary
    from inferplane_torch_accelerator.experts import tuned_experts

    kernels = (rms_norm, add_rms_norm, rotary, silu_and_mul, topk_softmax, best_token, encoder_attention)
    functions = {kernel.__name__: _launched(kernel, launch) for kernel in kernels}
    functions["fused_experts"] = tuned_experts(launch)
    return [OpImpl(name, function, PROVIDER, priority=10) for name, function in functions.items()]


def _launched(kernel: Callable[..., Any], launch: Launch) -> Callable[..., Any]:
    """The kernel, launched as the device of its first argument allows."""

    @wraps(kernel)
    def call(first: torch.Tensor, *args: Any, **options: Any) -> Any:
        return kernel(first, *args, **options, pdl=launch.pdl(first.device))

    return call
