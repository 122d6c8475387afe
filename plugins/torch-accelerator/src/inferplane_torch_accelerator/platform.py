"""The part of a platform that is the same for every accelerator of torch. Importing this module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from inferplane.api import Communicator, DeviceDescriptor, DeviceRuntime, Platform, ProcessGroup
from inferplane.api.config import ConfigError, ConfigPatch

if TYPE_CHECKING:
    from inferplane.api.config import EngineArgs, EngineConfig
    from inferplane.api.worker import Worker

LARGE_MEMORY_BYTES = 64 << 30
"""Of a device for which the activations of 16,384 tokens are little."""
_NATIVE_PRODUCT = {"bfloat16": "bf16_matmul", "float16": "fp16_matmul"}


class AcceleratorPlatform(Platform):
    """Needs to be told the runtime, and how ranks talk to each other."""

    collectives: ClassVar[str]
    """The backend of `torch.distributed`."""

    def config_defaults(
        self, args: EngineArgs, device: DeviceDescriptor, checkpoint_dtype: str
    ) -> ConfigPatch:
        """A checkpoint's dtype stays; bfloat16 becomes float16 on devices that multiply only the latter natively."""
        capability = _NATIVE_PRODUCT.get(checkpoint_dtype)
        keeps_dtype = capability is None or device.capabilities.has(capability)
        values = {
            "dtype": checkpoint_dtype if keeps_dtype else "float16",
            "block_size": 16,
            "max_num_seqs": 512,
            "max_num_batched_tokens": 16384 if device.total_memory_bytes >= LARGE_MEMORY_BYTES else 8192,
            "max_num_mixed_prompt_tokens": 2048,
            "async_scheduling": True,
        }
        reasons = {
            "max_num_mixed_prompt_tokens": "every stream waits for the whole step with its next token; offline (LLM) "
            "there is no limit"
        }
        if not keeps_dtype:
            reasons["dtype"] = f"the device has no {capability}"
        return ConfigPatch(values, reasons)

    def validate_config(self, config: EngineConfig, device: DeviceDescriptor) -> None:
        """bfloat16 needs a device that multiplies it."""
        if config.model.dtype == "bfloat16" and not device.capabilities.has("bf16_matmul"):
            raise ConfigError(
                "dtype", f"{device.name} does not multiply bfloat16; use --dtype float16 or float32"
            )

    def worker_class(self) -> type[Worker]:
        from inferplane.api.worker import ModelWorker

        return ModelWorker

    def communicator(self, group: ProcessGroup, runtime: DeviceRuntime) -> Communicator:
        from inferplane.api.torch_comm import TorchCommunicator

        return TorchCommunicator(group, self.collectives)
