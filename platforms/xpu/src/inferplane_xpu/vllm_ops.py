"""Ops of the package `vllm-xpu-kernels`, which registers them with torch when it is imported. Optional."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from inferplane.api.ops import OpImpl, OpQuery

PACKAGE = "vllm-xpu-kernels"
LEAST_VERSION = (0, 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.ops._C.rms_norm(out, x.contiguous(), weight, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    torch.ops._C.fused_add_rms_norm(x, residual, weight, eps)
    return x, residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    out = torch.empty(
        (*gate_up.shape[:-1], gate_up.shape[-1] // 2), dtype=gate_up.dtype, device=gate_up.device
    )
    torch.ops._C.silu_and_mul(out, gate_up.contiguous())
    return out


def unsupported_reason(query: OpQuery) -> str | None:
    if query.dtype not in DTYPES:
        return f"{PACKAGE} computes in float32, bfloat16 and float16, not in {query.dtype}"
    return why_no_vllm_ops()


@cache
def why_no_vllm_ops() -> str | None:
    """None where the package is installed, new enough, and loads beside this torch: it is bound to one."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return f"the package {PACKAGE} is not installed"
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < LEAST_VERSION:
        return f"{PACKAGE} {found} is installed; at least {'.'.join(map(str, LEAST_VERSION))} is needed"
    try:
        importlib.import_module("vllm_xpu_kernels._C")
    except (ImportError, OSError) as error:
        return f"{PACKAGE} {found} does not load beside torch {torch.__version__}: {error}"
    return None


OP_IMPLEMENTATIONS: list[OpImpl] = [
    OpImpl(fn.__name__, fn, PACKAGE, unsupported_reason, priority=5)
    for fn in (rms_norm, add_rms_norm, silu_and_mul)
]
"""Below the portable kernels, which the tests of this repository run."""
