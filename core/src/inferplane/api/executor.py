"""How the ranks of a model are run, for plugins that bring another way through ``executors``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferplane.executor.base import Executor, WorkerDiedError

if TYPE_CHECKING:
    from inferplane.api.comm import ProcessGroup
    from inferplane.api.worker import Worker
    from inferplane.config import EngineConfig

__all__ = ["Executor", "WorkerDiedError", "start_worker"]


def start_worker(config: EngineConfig, group: ProcessGroup) -> Worker:
    """The worker of one rank, in this process: loads the plugins that are installed here and selects the configured
    device. Nothing of the worker is set up yet."""
    from inferplane.executor.base import make_worker
    from inferplane.plugins import load_plugins

    return make_worker(config, load_plugins(quiet=True), group)
