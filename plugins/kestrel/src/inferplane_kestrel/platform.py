"""The Kestrel platform: defaults, and who does what on a card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inferplane.api import Communicator, DeviceDescriptor, DeviceRuntime, Platform, ProcessGroup

if TYPE_CHECKING:
    from inferplane.api.config import EngineArgs
    from inferplane.api.worker import Worker


class KestrelPlatform(Platform):
    name = "kestrel"

    def config_defaults(
        self, args: EngineArgs, device: DeviceDescriptor, checkpoint_dtype: str
    ) -> Mapping[str, Any]:
        return {
            "dtype": checkpoint_dtype,
            "block_size": 32,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 1024,
        }

    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime:
        from inferplane_kestrel.runtime import KestrelRuntime

        return KestrelRuntime(device)

    def worker_class(self) -> type[Worker]:
        from inferplane.api.worker import ModelWorker

        return ModelWorker

    def communicator(self, group: ProcessGroup, runtime: DeviceRuntime) -> Communicator:
        from inferplane_kestrel.communicator import KestrelCommunicator

        return KestrelCommunicator(group)
