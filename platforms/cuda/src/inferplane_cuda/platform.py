"""The CUDA platform."""

from __future__ import annotations

from inferplane.api import DeviceDescriptor, DeviceRuntime, Supported, Unsupported
from inferplane_cuda.probing import PLATFORM, probe
from inferplane_torch_accelerator.platform import AcceleratorPlatform


class CudaPlatform(AcceleratorPlatform):
    name = PLATFORM
    collectives = "nccl"

    def probe(self) -> Supported | Unsupported:
        return probe()

    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime:
        from inferplane_cuda.runtime import CudaRuntime

        return CudaRuntime(device)
