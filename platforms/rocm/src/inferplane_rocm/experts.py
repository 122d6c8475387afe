"""Quantized experts."""

from __future__ import annotations

from inferplane_rocm.launch import LAUNCH
from inferplane_torch_accelerator.quantized_experts import EightBitExperts


class RocmEightBitExperts(EightBitExperts):
    """Codes of a byte, with activations as they are."""

    name = "rocm_8bit_experts"
    launch = LAUNCH
