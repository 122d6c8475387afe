"""`LocalExecutor`: the only rank, in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from inferplane.api.comm import ProcessGroup
from inferplane.api.kv import KVCacheConfig, KVCacheSpec
from inferplane.api.worker import PendingStep, Worker
from inferplane.config import EngineConfig
from inferplane.executor.base import WorkerDiedError, make_worker
from inferplane.plan import StepPlan

if TYPE_CHECKING:
    from inferplane.plugins import PluginSet


class LocalExecutor:
    """An `Executor` of one rank: every call is the worker's own."""

    def __init__(self, config: EngineConfig, plugins: PluginSet, progress: bool = False) -> None:
        self._config = with_progress(config, progress)
        self._plugins = plugins
        self._worker: Worker | None = None
        self._is_shut_down = False

    @property
    def worker(self) -> Worker:
        self.check_health()
        if self._worker is None:
            raise RuntimeError("the executor is not started")
        return self._worker

    def start(self) -> None:
        self._worker = make_worker(self._config, self._plugins, ProcessGroup(0, 1, ""))
        self._worker.set_up()
        self._worker.join_group()
        self._worker.load_model()

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.worker.kv_cache_specs()

    def available_kv_bytes(self) -> int:
        return self.worker.available_kv_bytes()

    def init_kv_cache(self, kv_config: KVCacheConfig) -> None:
        self.worker.init_kv_cache(kv_config)

    def warm_up(self) -> None:
        self.worker.warm_up()

    def execute(self, plan: StepPlan) -> None:
        self.worker.execute(plan)

    def sample(self) -> PendingStep:
        return self.worker.sample()

    def expert_tokens(self) -> dict[str, list[int]]:
        return self.worker.expert_tokens()

    def profile(self, run: Callable[[], object]) -> str | None:
        return self.worker.profile(run)

    def check_health(self) -> None:
        if self._is_shut_down:
            raise WorkerDiedError("the executor is shut down")

    def shutdown(self) -> None:
        self._is_shut_down = True
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def with_progress(config: EngineConfig, progress: bool) -> EngineConfig:
    return replace(config, load=replace(config.load, progress=config.load.progress and progress))
