"""One GPU as a device."""

from __future__ import annotations

from inferplane_torch_accelerator.runtime import AcceleratorRuntime


class RocmRuntime(AcceleratorRuntime):
    """Through `torch.cuda`, which is HIP's interface in a torch that is built for ROCm."""

    device_type = "cuda"
