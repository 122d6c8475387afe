"""One GPU as a device."""

from __future__ import annotations

from inferplane_torch_accelerator.runtime import AcceleratorRuntime


class CudaRuntime(AcceleratorRuntime):
    """Through `torch.cuda`."""

    device_type = "cuda"
