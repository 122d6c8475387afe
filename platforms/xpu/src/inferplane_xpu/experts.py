"""Quantized experts."""

from __future__ import annotations

from inferplane_torch_accelerator.quantized_experts import EightBitExperts, FourBitExperts
from inferplane_xpu.launch import LAUNCH


class XpuEightBitExperts(EightBitExperts):
    """Codes of a byte, with activations as they are."""

    name = "xpu_8bit_experts"
    launch = LAUNCH


class XpuFourBitExperts(FourBitExperts):
    """Codes of four bits, with activations as they are."""

    name = "xpu_4bit_experts"
    launch = LAUNCH
