"""The XPU platform."""

from __future__ import annotations

from inferplane.api import DeviceDescriptor, DeviceRuntime
from inferplane_torch_accelerator.platform import AcceleratorPlatform
from inferplane_xpu.probing import PLATFORM


class XpuPlatform(AcceleratorPlatform):
    name = PLATFORM
    collectives = "xccl"
    """What oneCCL is called in `torch.distributed`."""

    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime:
        from inferplane_xpu.runtime import XpuRuntime

        return XpuRuntime(device)
