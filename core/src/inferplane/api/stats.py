"""The engine's figures, for plugins that take them somewhere through ``stat_loggers``. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from inferplane.config import EngineConfig
from inferplane.engine.stats import EngineStats

__all__ = ["EngineStats", "StatLogger"]


class StatLogger(ABC):
    """Gets the newest figures every `interval_s`, in a thread of its own, so that a slow one holds up nobody."""

    interval_s: ClassVar[float] = 10.0

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def record(self, stats: EngineStats) -> None:
        """One that raises is logged once and not called again."""

    def close(self) -> None:
        """After the last figures."""
        return
