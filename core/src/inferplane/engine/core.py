"""`EngineCore`: one model, one scheduler, one executor, and the loop that steps them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from inferplane.api.kv import KVCacheConfig
from inferplane.config import EngineConfig
from inferplane.engine.kv_sizing import size_pool
from inferplane.engine.stats import EngineStats
from inferplane.executor import Executor, WorkerDiedError, make_executor
from inferplane.plugins.target import import_target
from inferplane.request import EngineOutput, EngineRequest
from inferplane.scheduler import Scheduler, SchedulerPolicy

if TYPE_CHECKING:
    from inferplane.plugins import PluginSet

logger = logging.getLogger(__name__)


class EngineCore:
    """Runs requests to their end, one step at a time. Not thread-safe: one thread calls everything.

    Made, it is ready to serve: the weights are loaded and the KV cache is allocated. Raises `ConfigError` or
    `ModelLoadError`.
    """

    def __init__(self, config: EngineConfig, plugins: PluginSet) -> None:
        self.timings: dict[str, float] = {}
        """Seconds of each phase of the start."""
        self._executor: Executor = make_executor(config, plugins, config.load.progress)
        try:
            with self._timed("weights"):
                self._executor.start()
            with self._timed("kv cache"):
                self.config, self.kv_config = self._allocate_kv_cache(config)
            with self._timed("warm-up"):
                self._executor.warm_up()
            self._scheduler = Scheduler(
                self.config.scheduler,
                self.config.cache,
                self.config.model.max_model_len,
                self.kv_config,
                seed=self.config.seed,
                policies=_contributed_policy(config.scheduler.policy, plugins.scheduler_policies()),
                managers=plugins.kv_cache_specs(),
            )
        except BaseException:
            self._executor.shutdown()
            raise
        self._num_steps = 0
        self._last_step_s = 0.0

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.timings[phase] = time.perf_counter() - started

    def _allocate_kv_cache(self, config: EngineConfig) -> tuple[EngineConfig, KVCacheConfig]:
        """The configuration with the context length that really fits, and the pool."""
        size = size_pool(self._executor.kv_cache_specs(), self._executor.available_kv_bytes(), config.model)
        if size.max_model_len < config.model.max_model_len:
            logger.warning(
                "max_model_len is lowered from %d to %d tokens: the KV cache has room for no longer sequence",
                config.model.max_model_len,
                size.max_model_len,
            )
        self._executor.init_kv_cache(size.kv_config)
        return replace(config, model=replace(config.model, max_model_len=size.max_model_len)), size.kv_config

    @property
    def num_blocks(self) -> int:
        return self.kv_config.num_blocks

    def add_request(self, request: EngineRequest) -> None:
        """Raises what `Scheduler.add` raises; the request is then as if it had never been."""
        self._scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Ends requests and frees what they hold; unknown ids are ignored."""
        return self._scheduler.abort(request_ids)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def step(self) -> list[EngineOutput]:
        """Moves every scheduled request forward. What a single request breaks fails that request only.

        Raises `WorkerDiedError` when a worker is gone: then nothing can be saved.
        """
        plan = self._scheduler.schedule()
        if plan is None:
            return []
        started = time.perf_counter()
        try:
            self._executor.execute(plan)
            result = self._executor.sample()
        except Exception as error:
            if isinstance(error, WorkerDiedError):
                raise
            logger.exception("step %d with %d requests raised", plan.step_id, len(plan.num_scheduled_tokens))
            return self._scheduler.fail_step(plan, error)
        except BaseException as interrupt:  # the plan is answered, so that the engine can go on afterwards
            self._scheduler.fail_step(plan, interrupt)
            raise
        finally:
            self._num_steps += 1
            self._last_step_s = time.perf_counter() - started
        return self._scheduler.update(plan, result)

    def stats(self) -> EngineStats:
        return EngineStats.of(
            self._scheduler.stats(), num_steps=self._num_steps, last_step_s=self._last_step_s
        )

    def check_health(self) -> None:
        """Raises `WorkerDiedError` when a worker is gone."""
        self._executor.check_health()

    def shutdown(self) -> None:
        """Ends the workers and frees the device. May be called twice."""
        self._executor.shutdown()


def _contributed_policy(name: str, targets: Mapping[str, str]) -> dict[str, SchedulerPolicy]:
    """The policy of that name, when it is a plugin's."""
    if name not in targets:
        return {}
    return {name: import_target(targets[name], f"the scheduler policy {name!r}")()}
