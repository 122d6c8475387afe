"""The CUDA platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferplane.api import DeviceDescriptor, DeviceRuntime, Supported, Unsupported
from inferplane_cuda.probing import PLATFORM, probe
from inferplane_torch_accelerator.platform import AcceleratorPlatform

if TYPE_CHECKING:
    from inferplane.api.worker import Worker


class CudaPlatform(AcceleratorPlatform):
    name = PLATFORM
    collectives = "nccl"

    def probe(self) -> Supported | Unsupported:
        return probe()

    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime:
        from inferplane_cuda.runtime import CudaRuntime

        return CudaRuntime(device)

    def worker_class(self) -> type[Worker]:
        from inferplane_cuda.worker import CudaWorker

        return CudaWorker
