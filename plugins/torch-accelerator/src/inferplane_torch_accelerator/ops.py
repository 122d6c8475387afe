"""Ops for which the Triton kernels beat the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from inferplane.api.draw_op import DrawHints
from inferplane.api.ops import OpImpl
from inferplane_torch_accelerator.launch import Launch

PROVIDER = "inferplane-kernels-triton"


def triton_ops(launch: Launch) -> list[OpImpl]:
    """What a platform offers of the portable kernels; nothing where there is no triton for it."""
    if launch.why_not():
        return []
    from inferplane_kernels_triton.activation import silu_and_mul
    from inferplane_kernels_triton.best_token import best_token
    from inferplane_kernels_triton.moe_routing import topk_softmax
    from inferplane_kernels_triton.norm import add_rms_norm, rms_norm
    from inferplane_kernels_triton.packed_attention import causal_attention, encoder_attention
    from inferplane_kernels_triton.rotary import rotary
    from inferplane_torch_accelerator.experts import tuned_experts

    kernels = (
        rms_norm,
        add_rms_norm,
        rotary,
        silu_and_mul,
        topk_softmax,
        best_token,
        encoder_attention,
        causal_attention,
    )
    functions = {kernel.__name__: _launched(kernel, launch) for kernel in kernels}
    functions["fused_experts"] = tuned_experts(launch)
    functions["draw_token"] = _draw_token(launch)
    return [OpImpl(name, function, PROVIDER, priority=10) for name, function in functions.items()]


def _launched(kernel: Callable[..., Any], launch: Launch) -> Callable[..., Any]:
    """The kernel, launched as the device of its first argument allows."""

    @wraps(kernel)
    def call(first: torch.Tensor, *args: Any, **options: Any) -> Any:
        return kernel(first, *args, **options, pdl=launch.pdl(first.device))

    return call


def _draw_token(launch: Launch) -> Callable[..., torch.Tensor]:
    from inferplane_kernels_triton.draw_token import draw_token

    def call(
        logits: torch.Tensor, floats: torch.Tensor, ints: torch.Tensor, hints: DrawHints
    ) -> torch.Tensor:
        return draw_token(
            logits, floats, ints, has_top_k=hints.top_k_width > 0, has_top_p=hints.has_top_p,
            pdl=launch.pdl(logits.device),
        )  # fmt: skip

    return call
