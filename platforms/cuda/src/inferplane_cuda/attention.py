"""The platform's attention backends that run on every GPU."""

from __future__ import annotations

from inferplane_cuda.launch import LAUNCH
from inferplane_torch_accelerator.torch_attention import TorchAttention
from inferplane_torch_accelerator.triton_attention import TritonAttention


class CudaTritonAttention(TritonAttention):
    """Attention by the portable kernels."""

    name = "cuda_triton"
    launch = LAUNCH


class CudaTorchAttention(TorchAttention):
    """Attention by torch's own kernels."""

    name = "cuda_torch"
