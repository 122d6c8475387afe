"""The CUDA platform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inferplane.api import Communicator, DeviceDescriptor, DeviceRuntime, Platform, ProcessGroup, Supported
from inferplane_cuda.probing import PLATFORM, probe

if TYPE_CHECKING:
    from inferplane.api.config import EngineArgs, EngineConfig
    from inferplane.api.worker import Worker

_NATIVE_PRODUCT = {"bfloat16": "bf16_matmul", "float16": "fp16_matmul"}


class CudaPlatform(Platform):
    name = PLATFORM

    def config_defaults(
        self, args: EngineArgs, device: DeviceDescriptor, checkpoint_dtype: str
    ) -> Mapping[str, Any]:
        """Half precision stays as it is stored; bfloat16 becomes float16 on GPUs that multiply only the latter."""
        capability = _NATIVE_PRODUCT.get(checkpoint_dtype)
        keeps_dtype = capability is None or device.capabilities.has(capability)
        return {
            "dtype": checkpoint_dtype if keeps_dtype else "float16",
            "block_size": 16,
            "max_num_seqs": 512,
            "max_num_batched_tokens": 8192,
            "async_scheduling": True,
        }

    def validate_config(self, config: EngineConfig, device: DeviceDescriptor) -> None:
        """Every rank needs a GPU of its own, and bfloat16 one that multiplies it."""
        from inferplane.api.config import ConfigError

        if config.model.dtype == "bfloat16" and not device.capabilities.has("bf16_matmul"):
            raise ConfigError(
                "dtype", f"{device.name} does not multiply bfloat16; use --dtype float16 or float32"
            )
        world_size = config.parallel.world_size
        found = probe()
        num_visible = len(found.devices) if isinstance(found, Supported) else 0
        num_left = num_visible - device.index
        if world_size > 1 and world_size > num_left:
            raise ConfigError(
                "tensor_parallel_size",
                f"tensor_parallel_size {world_size} needs as many GPUs from cuda:{device.index} on, and this process "
                f"sees {num_left}",
            )

    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime:
        from inferplane_cuda.runtime import CudaRuntime

        return CudaRuntime(device)

    def worker_class(self) -> type[Worker]:
        from inferplane_cuda.worker import CudaWorker

        return CudaWorker

    def communicator(self, group: ProcessGroup, runtime: DeviceRuntime) -> Communicator:
        from inferplane.api.torch_comm import TorchCommunicator

        return TorchCommunicator(group, "nccl")
