"""How the platform launches the portable Triton kernels."""

from __future__ import annotations

from pathlib import Path

import torch

from inferplane_kernels_cuda import tuning_file
from inferplane_torch_accelerator.launch import Launch

DEPENDENT_LAUNCH = False
"""Whether a kernel may start while the one before it still runs (GPUs with ``bulk_tensor_copy`` only)."""


def _tuning_file(device: torch.device) -> Path | None:
    return tuning_file(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None


LAUNCH = Launch(pdl=DEPENDENT_LAUNCH, tuning_file=_tuning_file)
