"""Products by weights."""

from __future__ import annotations

from inferplane_torch_accelerator.fp8_linear import Fp8Linear
from inferplane_torch_accelerator.int4_linear import Int4Linear
from inferplane_torch_accelerator.int8_linear import Int8Linear
from inferplane_torch_accelerator.linear import DenseLinear
from inferplane_xpu.launch import LAUNCH


class XpuLinear(DenseLinear):
    """Plain weights: one row by the portable kernel, more by torch, which asks oneDNN. The reference where the
    installed triton does not compile for Intel GPUs."""

    name = "xpu_dense"
    launch = LAUNCH


class XpuFp8Linear(Fp8Linear):
    """fp8 weights: one row by the portable kernel, more by torch, which asks oneDNN; that widens 8-bit floats where the
    matrix engines have none."""

    name = "xpu_fp8"
    launch = LAUNCH
    needs = "bf16_matmul"


class XpuInt4Linear(Int4Linear):
    """Weights of up to four bits, with activations as they are."""

    name = "xpu_int4"
    launch = LAUNCH


class XpuInt8Linear(Int8Linear):
    """Weights of eight-bit whole numbers, with activations as they are."""

    name = "xpu_int8"
    launch = LAUNCH
