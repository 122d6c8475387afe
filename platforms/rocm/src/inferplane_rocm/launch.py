"""How the platform launches the portable Triton kernels."""

from __future__ import annotations

from pathlib import Path

import torch

from inferplane_kernels_rocm import tuning_file
from inferplane_torch_accelerator.launch import Launch


def architecture_of(device: torch.device) -> str:
    """``gfx942`` of ``gfx942:sramecc+:xnack-``."""
    name: str = torch.cuda.get_device_properties(device).gcnArchName
    return name.partition(":")[0]


def _tuning_file(device: torch.device) -> Path | None:
    return tuning_file(architecture_of(device)) if device.type == "cuda" else None


LAUNCH = Launch("amd", tuning_file=_tuning_file)
"""Nothing overlaps: dependent launches are another vendor's."""
