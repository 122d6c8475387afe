"""Products by weights."""

from __future__ import annotations

from inferplane_cuda.launch import LAUNCH
from inferplane_torch_accelerator.linear import DenseLinear


class CudaLinear(DenseLinear):
    """Plain weights."""

    name = "cuda_dense"
    launch = LAUNCH
