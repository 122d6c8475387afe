"""Products by weights."""

from __future__ import annotations

from inferplane_cuda.launch import LAUNCH
from inferplane_torch_accelerator.fp8_block_linear import Fp8BlockLinear
from inferplane_torch_accelerator.fp8_linear import Fp8Linear
from inferplane_torch_accelerator.int4_linear import Int4Linear
from inferplane_torch_accelerator.int8_linear import Int8Linear
from inferplane_torch_accelerator.linear import DenseLinear


class CudaLinear(DenseLinear):
    """Plain weights."""

    name = "cuda_dense"
    launch = LAUNCH


class CudaFp8Linear(Fp8Linear):
    """fp8 weights."""

    name = "cuda_fp8"
    launch = LAUNCH


class CudaFp8BlockLinear(Fp8BlockLinear):
    """fp8 weights with a scale for each block."""

    name = "cuda_fp8_block"
    launch = LAUNCH


class CudaInt4Linear(Int4Linear):
    """Weights of up to four bits, with activations as they are."""

    name = "cuda_int4"
    launch = LAUNCH


class CudaInt8Linear(Int8Linear):
    """Weights of eight-bit whole numbers, with activations as they are."""

    name = "cuda_int8"
    launch = LAUNCH
