"""`StatLogging`: gives plugins' stat loggers the engine's figures, each in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from inferplane.api.stats import StatLogger
from inferplane.config import EngineConfig
from inferplane.engine.stats import EngineStats
from inferplane.plugins.record import PluginError
from inferplane.plugins.target import import_target

logger = logging.getLogger(__name__)

END_S = 2.0
"""How long the loggers have for their last words."""


def make_stat_loggers(targets: Sequence[str], config: EngineConfig) -> list[StatLogger]:
    """Raises `PluginError` for a target that cannot be imported or is no `StatLogger`."""
    made = []
    for target in targets:
        found = import_target(target, "a stat logger")
        if not (isinstance(found, type) and issubclass(found, StatLogger)):
            raise PluginError(f"{target} is offered as a stat logger, but is no subclass of StatLogger")
        made.append(found(config))
    return made


class StatLogging:
    """Threads are daemons, so that one that hangs keeps nothing from ending."""

    def __init__(self, loggers: Sequence[StatLogger], read_stats: Callable[[], EngineStats]) -> None:
        self._read_stats = read_stats
        self._has_ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name=f"stats-{type(each).__name__}", daemon=True)
            for each in loggers
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Has every logger record the last figures and close. May be called twice."""
        self._has_ended.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(END_S)

    def _run(self, stat_logger: StatLogger) -> None:
        try:
            while not self._has_ended.wait(stat_logger.interval_s):
                stat_logger.record(self._read_stats())
            stat_logger.record(self._read_stats())
            stat_logger.close()
        except Exception:
            logger.exception("stat logger %s raised and is not called again", type(stat_logger).__name__)
