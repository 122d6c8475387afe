"""The platform's attention backends."""

from __future__ import annotations

from inferplane_torch_accelerator.torch_attention import TorchAttention
from inferplane_torch_accelerator.triton_attention import TritonAttention
from inferplane_xpu.launch import LAUNCH


class XpuTritonAttention(TritonAttention):
    """Attention by the portable kernels, where the installed triton compiles for Intel GPUs."""

    name = "xpu_triton"
    launch = LAUNCH


class XpuTorchAttention(TorchAttention):
    """Attention by torch's own kernels."""

    name = "xpu_torch"
