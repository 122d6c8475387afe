"""Kernels for ops that the card computes in one launch. What is not here runs on the core's reference."""

from __future__ import annotations

import torch

from inferplane.api.ops import OpImpl
from inferplane_kestrel.device import kernel

PROVIDER = "inferplane-kestrel"


@kernel
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


@kernel
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual += x
    return torch.nn.functional.rms_norm(residual, x.shape[-1:], weight, eps), residual


@kernel
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    dim = gate_up.shape[-1] // 2
    return torch.nn.functional.silu(gate_up[..., :dim]).mul_(gate_up[..., dim:])


OP_IMPLEMENTATIONS = [
    OpImpl("rms_norm", rms_norm, PROVIDER),
    OpImpl("add_rms_norm", add_rms_norm, PROVIDER),
    OpImpl("silu_and_mul", silu_and_mul, PROVIDER),
]
