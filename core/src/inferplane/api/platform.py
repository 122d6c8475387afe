"""A platform: what one plugin answers for its own devices. Importing its module must not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from inferplane.api.comm import Communicator, ProcessGroup
    from inferplane.api.device import DeviceDescriptor, DeviceRuntime
    from inferplane.api.worker import Worker
    from inferplane.config import EngineArgs, EngineConfig


class Platform(ABC):
    """Made by the `create_platform` hook for the selected device, in the front end and in each worker."""

    name: ClassVar[str]
    ranks_share_device: ClassVar[bool] = False
    """Whether all ranks run on one device, as they do on a host's processors. Else each needs its own: that of the same
    number from rank 0's on."""

    @abstractmethod
    def config_defaults(
        self, args: EngineArgs, device: DeviceDescriptor, checkpoint_dtype: str
    ) -> Mapping[str, Any]:
        """Values for the arguments that the user left open. Keys are fields of `EngineArgs`.

        ``dtype`` (asked as "auto"), ``block_size``, ``max_num_seqs`` and ``max_num_batched_tokens`` must be among
        them; values for arguments that the user set are ignored. ``checkpoint_dtype`` is that of the stored weights. A
        `ConfigPatch` (`inferplane.api.config`) also says why, for ``inferplane plugins explain``.
        """

    def quantized_defaults(
        self,
        args: EngineArgs,
        device: DeviceDescriptor,
        checkpoint_dtype: str,
        hf_config: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """As `config_defaults`, which it is without an override, for a checkpoint whose weights are quantized.

        ``hf_config["quantization_config"]`` says how; of a GGUF file its ``quant_method`` is ``gguf``.
        """
        return self.config_defaults(args, device, checkpoint_dtype)

    def unsupported_sampling(self) -> Mapping[str, str]:
        """Fields of `SamplingParams` that the platform's worker does not honour, each with the reason.

        A request that sets one is refused with a 400 that names the field. The core's `ModelWorker` honours them all.
        """
        return {}

    def validate_config(self, config: EngineConfig, device: DeviceDescriptor) -> None:
        """Raises `ConfigError` (`inferplane.api.config`) for what this device cannot do, with the name of the option
        and the reason: ``ConfigError("dtype", "this card has no bfloat16")``. Before weights are loaded."""
        return

    @abstractmethod
    def device_runtime(self, device: DeviceDescriptor) -> DeviceRuntime: ...

    @abstractmethod
    def worker_class(self) -> type[Worker]: ...

    @abstractmethod
    def communicator(self, group: ProcessGroup, runtime: DeviceRuntime) -> Communicator:
        """Joins the group; blocks until every rank has. Only called for a world size above 1."""
