"""Ops for which the device has a kernel. What is not here runs on the core's reference."""

from __future__ import annotations

import torch

from inferplane.api.ops import OpImpl

PROVIDER = "inferplane-acme"


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Yours: a call of the device's kernel. One op of `inferplane.api.ops` after the other, where it pays."""
    dim = gate_up.shape[-1] // 2
    return torch.nn.functional.silu(gate_up[..., :dim]).mul_(gate_up[..., dim:])


OP_IMPLEMENTATIONS = [OpImpl("silu_and_mul", silu_and_mul, PROVIDER)]
