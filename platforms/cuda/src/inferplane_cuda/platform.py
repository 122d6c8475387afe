"""The CUDA platform."""

from __future__ import annotations

from inferplane.api import Communicator, DeviceDescriptor, DeviceRuntime, ProcessGroup
from inferplane_cuda.probing import PLATFORM
from inferplane_torch_accelerator.platform import AcceleratorPlatform


class CudaPlatform(AcceleratorPlatform):
    name = PLATFORM
    collectives = "nccl"

    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime:
        from inferplane_cuda.runtime import CudaRuntime

        return CudaRuntime(device)

    def communicator(self, group: ProcessGroup, runtime: DeviceRuntime) -> Communicator:
        from inferplane_cuda.communicator import CudaCommunicator

        return CudaCommunicator(group, runtime.torch_device)
