"""The platform's attention backends that need nothing but torch and triton."""

from __future__ import annotations

from inferplane_rocm.launch import LAUNCH
from inferplane_torch_accelerator.torch_attention import TorchAttention
from inferplane_torch_accelerator.triton_attention import TritonAttention


class RocmTritonAttention(TritonAttention):
    """Attention by the portable kernels, as the architecture's table says."""

    name = "rocm_triton"
    launch = LAUNCH


class RocmTorchAttention(TorchAttention):
    """Attention by torch's own kernels."""

    name = "rocm_torch"
