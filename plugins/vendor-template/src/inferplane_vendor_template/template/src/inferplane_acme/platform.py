"""The platform: defaults, and who does what on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inferplane.api import Communicator, DeviceDescriptor, DeviceRuntime, Platform, ProcessGroup

if TYPE_CHECKING:
    from inferplane.api.config import EngineArgs
    from inferplane.api.worker import Worker


class AcmePlatform(Platform):
    name = "acme"

    def config_defaults(
        self, args: EngineArgs, device: DeviceDescriptor, checkpoint_dtype: str
    ) -> Mapping[str, Any]:
        """Yours: what suits the device when the user does not say."""
        return {
            "dtype": checkpoint_dtype,
            "block_size": 16,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 1024,
        }

    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime:
        from inferplane_acme.runtime import AcmeRuntime

        return AcmeRuntime(device)

    def worker_class(self) -> type[Worker]:
        from inferplane.api.worker import ModelWorker

        return ModelWorker

    def communicator(self, group: ProcessGroup, runtime: DeviceRuntime) -> Communicator:
        """Yours: the torch.distributed backend of the device, or a `Communicator` of its own."""
        from inferplane.api.torch_comm import TorchCommunicator

        return TorchCommunicator(group, "gloo")
