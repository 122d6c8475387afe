"""Products by weights."""

from __future__ import annotations

from inferplane_rocm.launch import LAUNCH
from inferplane_torch_accelerator.fp8_block_linear import Fp8BlockLinear
from inferplane_torch_accelerator.fp8_linear import Fp8Linear
from inferplane_torch_accelerator.int4_linear import Int4Linear
from inferplane_torch_accelerator.int8_linear import Int8Linear
from inferplane_torch_accelerator.linear import DenseLinear


class RocmLinear(DenseLinear):
    """Plain weights: one row by the portable kernel, more by torch, which asks hipBLASLt."""

    name = "rocm_dense"
    launch = LAUNCH


class RocmFp8Linear(Fp8Linear):
    """fp8 weights, on GPUs whose 8-bit floats are those of checkpoints: gfx942's are others."""

    name = "rocm_fp8"
    launch = LAUNCH


class RocmFp8BlockLinear(Fp8BlockLinear):
    """fp8 weights with a scale for each block, on the same GPUs."""

    name = "rocm_fp8_block"
    launch = LAUNCH


class RocmInt4Linear(Int4Linear):
    """Weights of up to four bits, with activations as they are."""

    name = "rocm_int4"
    launch = LAUNCH


class RocmInt8Linear(Int8Linear):
    """Weights of eight-bit whole numbers, with activations as they are."""

    name = "rocm_int8"
    launch = LAUNCH
