"""Quantized experts."""

from __future__ import annotations

from inferplane_cuda.launch import LAUNCH
from inferplane_torch_accelerator.quantized_experts import EightBitExperts, FourBitExperts


class CudaEightBitExperts(EightBitExperts):
    """Codes of a byte, with activations as they are."""

    name = "cuda_8bit_experts"
    launch = LAUNCH


class CudaFourBitExperts(FourBitExperts):
    """Codes of four bits, with activations as they are."""

    name = "cuda_4bit_experts"
    launch = LAUNCH
