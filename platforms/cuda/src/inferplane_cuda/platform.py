"""The CUDA platform."""

from __future__ import annotations

from inferplane.api import Communicator, DeviceDescriptor, DeviceRuntime, ProcessGroup
from inferplane.api.config import ConfigPatch, EngineArgs
from inferplane_cuda.flash_packages import BLOCK_SIZE, CAPABILITY, missing_package
from inferplane_cuda.probing import PLATFORM
from inferplane_torch_accelerator.platform import AcceleratorPlatform


class CudaPlatform(AcceleratorPlatform):
    name = PLATFORM
    collectives = "nccl"

    def config_defaults(
        self, args: EngineArgs, device: DeviceDescriptor, checkpoint_dtype: str
    ) -> ConfigPatch:
        """As those of all accelerators, with blocks that suit FlashAttention where it is installed and the GPU and the
        dtype suit it. Whether the model's layers do is not known here."""
        patch = super().config_defaults(args, device, checkpoint_dtype)
        dtype = patch["dtype"] if args.dtype == "auto" else args.dtype
        is_flash = (
            args.attention_backend in (None, "cuda_flash")
            and args.kv_cache_dtype == "auto"
            and dtype in ("bfloat16", "float16")
            and device.capabilities.has(CAPABILITY)
            and missing_package() is None
        )
        if not is_flash:
            return patch
        why = "FlashAttention reads such a block by one bulk copy; beginnings of prompts are shared block by block"
        return ConfigPatch({**patch, "block_size": BLOCK_SIZE}, {**patch.reasons, "block_size": why})

    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime:
        from inferplane_cuda.runtime import CudaRuntime

        return CudaRuntime(device)

    def communicator(self, group: ProcessGroup, runtime: DeviceRuntime) -> Communicator:
        from inferplane_cuda.communicator import CudaCommunicator

        return CudaCommunicator(group, runtime.torch_device)
