"""How the platform launches the portable Triton kernels."""

from __future__ import annotations

from pathlib import Path

import torch

from inferplane_kernels_cuda import tuning_file
from inferplane_torch_accelerator.launch import Launch

LEAST_CAPABILITY_OF_DEPENDENT_LAUNCH = (9, 0)


def _has_dependent_launch(device: torch.device) -> bool:
    """The GPU must know it, and so must the compiler."""
    if device.type != "cuda":
        return False
    import triton.language as tl

    is_new_enough = torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY_OF_DEPENDENT_LAUNCH
    return is_new_enough and hasattr(tl.extra.cuda, "gdc_wait")


def _tuning_file(device: torch.device) -> Path | None:
    return tuning_file(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None


LAUNCH = Launch("nvidia", pdl=_has_dependent_launch, tuning_file=_tuning_file)
