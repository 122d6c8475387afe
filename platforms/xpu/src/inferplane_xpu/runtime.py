"""One GPU as a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferplane.api import DeviceDescriptor, GraphBackend
from inferplane_torch_accelerator.runtime import AcceleratorRuntime

if TYPE_CHECKING:
    from inferplane.api.config import EngineConfig

GRAPHS_OPTION = "xpu_graphs"


class XpuRuntime(AcceleratorRuntime):
    """Through `torch.xpu`."""

    device_type = "xpu"

    def __init__(self, descriptor: DeviceDescriptor) -> None:
        super().__init__(descriptor)
        self._records_graphs = False

    def set_up(self, config: EngineConfig, rank: int) -> None:
        super().set_up(config, rank)
        self._records_graphs = bool(config.plugin_options.get(GRAPHS_OPTION))

    def graphs(self) -> GraphBackend | None:
        """Only when asked for: torch's recorder for these devices is young, and nobody has tried it here."""
        return super().graphs() if self._records_graphs else None
