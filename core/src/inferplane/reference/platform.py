"""The reference platform and its device, the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inferplane.api import Communicator, DeviceDescriptor, DeviceRuntime, MemoryInfo, Platform, ProcessGroup
from inferplane.api.host_memory import host_memory

if TYPE_CHECKING:
    from inferplane.api.worker import Worker
    from inferplane.config import EngineArgs, EngineConfig


class ReferencePlatform(Platform):
    name = "reference"
    ranks_share_device = True

    def config_defaults(
        self, args: EngineArgs, device: DeviceDescriptor, checkpoint_dtype: str
    ) -> Mapping[str, Any]:
        # an oracle rounds as little as it can, whatever the weights are stored in
        return {
            "dtype": "float32",
            "block_size": 16,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 1024,
        }

    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime:
        return HostRuntime(device)

    def worker_class(self) -> type[Worker]:
        from inferplane.api.worker import ModelWorker

        return ModelWorker

    def communicator(self, group: ProcessGroup, runtime: DeviceRuntime) -> Communicator:
        from inferplane.api.torch_comm import TorchCommunicator

        return TorchCommunicator(group, "gloo")


class HostRuntime(DeviceRuntime):
    def __init__(self, descriptor: DeviceDescriptor) -> None:
        import torch

        self.descriptor = descriptor
        self.torch_device = torch.device("cpu")

    def set_up(self, config: EngineConfig, rank: int) -> None:
        import torch

        if config.device.num_threads is not None:
            torch.set_num_threads(config.device.num_threads)

    def memory(self) -> MemoryInfo:
        return host_memory()
