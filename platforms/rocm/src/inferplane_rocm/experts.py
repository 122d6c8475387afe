"""Quantized experts."""

from __future__ import annotations

from inferplane_rocm.launch import LAUNCH
from inferplane_torch_accelerator.quantized_experts import EightBitExperts, FourBitExperts


class RocmEightBitExperts(EightBitExperts):
    """Codes of a byte, with activations as they are."""

    name = "rocm_8bit_experts"
    launch = LAUNCH


class RocmFourBitExperts(FourBitExperts):
    """Codes of four bits, with activations as they are."""

    name = "rocm_4bit_experts"
    launch = LAUNCH
