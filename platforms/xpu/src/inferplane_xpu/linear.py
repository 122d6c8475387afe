"""Products by weights."""

from __future__ import annotations

from inferplane_torch_accelerator.linear import DenseLinear
from inferplane_xpu.launch import LAUNCH


class XpuLinear(DenseLinear):
    """Plain weights: one row by the portable kernel, more by torch, which asks oneDNN. The reference where the
    installed triton does not compile for Intel GPUs."""

    name = "xpu_dense"
    launch = LAUNCH
