"""The ROCm platform."""

from __future__ import annotations

from inferplane.api import DeviceDescriptor, DeviceRuntime
from inferplane_rocm.probing import PLATFORM
from inferplane_torch_accelerator.platform import AcceleratorPlatform


class RocmPlatform(AcceleratorPlatform):
    name = PLATFORM
    collectives = "nccl"
    """What RCCL is called in `torch.distributed`."""

    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime:
        from inferplane_rocm.runtime import RocmRuntime

        return RocmRuntime(device)
