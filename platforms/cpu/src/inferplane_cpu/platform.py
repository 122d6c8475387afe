"""The CPU platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferplane.api import Communicator, DeviceDescriptor, DeviceRuntime, Platform, ProcessGroup
from inferplane.api.config import ConfigPatch

if TYPE_CHECKING:
    from inferplane.api.config import EngineArgs
    from inferplane.api.worker import Worker

PREFIX_CACHE_BYTES = 256 << 20

_NATIVE_PRODUCT = {"bfloat16": "bf16_matmul", "float16": "fp16_matmul"}


class CpuPlatform(Platform):
    name = "cpu"

    def config_defaults(
        self, args: EngineArgs, device: DeviceDescriptor, checkpoint_dtype: str
    ) -> ConfigPatch:
        """A half-precision checkpoint stays so only where the processor multiplies it natively.

        Elsewhere a product of many rows in half precision is several times slower than in float32, for half the memory.

        The step's budget of tokens is as small as it can be without costing throughput (on 2 cores 2,048 is 1 % quicker
        than 1,024, and 512 is 3 % slower): while a prompt of that size is computed, nobody else gets a token.

        What finished requests leave in the cache takes memory that other programs could use, so it is bounded, unless
        the user said how large the cache may be.
        """
        capability = _NATIVE_PRODUCT.get(checkpoint_dtype)
        keeps_dtype = capability is not None and device.capabilities.has(capability)
        values = {
            "dtype": checkpoint_dtype if keeps_dtype else "float32",
            "block_size": 32,
            "max_num_seqs": 128,
            "max_num_batched_tokens": 1024,
        }
        reasons = {"max_num_batched_tokens": "a longer step would keep others waiting and gain 1 %"}
        if args.kv_cache_bytes is None and args.memory_share is None:
            values["prefix_cache_bytes"] = PREFIX_CACHE_BYTES
            reasons["prefix_cache_bytes"] = "memory that requests no longer use is left to other programs"
        if not keeps_dtype and checkpoint_dtype != "float32":
            reasons["dtype"] = f"the processor has no native product of {checkpoint_dtype}"
        return ConfigPatch(values, reasons)

    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime:
        from inferplane_cpu.runtime import CpuRuntime

        return CpuRuntime(device)

    def worker_class(self) -> type[Worker]:
        from inferplane.api.worker import ModelWorker

        return ModelWorker

    def communicator(self, group: ProcessGroup, runtime: DeviceRuntime) -> Communicator:
        from inferplane.api.torch_comm import TorchCommunicator

        return TorchCommunicator(group, "gloo")
