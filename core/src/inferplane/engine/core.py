"""`EngineCore`: one model, one scheduler, one executor, and the loop that steps them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from inferplane.api.kv import KVCacheConfig
from inferplane.config import ConfigError, EngineConfig
from inferplane.engine.kv_listening import make_kv_listener
from inferplane.engine.kv_sizing import size_pool
from inferplane.engine.stats import EngineStats
from inferplane.executor import Executor, WorkerDiedError, make_executor
from inferplane.plan import StepPlan
from inferplane.plugins.target import import_target
from inferplane.request import EngineOutput, EngineRequest
from inferplane.scheduler import Scheduler, SchedulerPolicy

if TYPE_CHECKING:
    from inferplane.api.worker import PendingStep
    from inferplane.plugins import PluginSet

logger = logging.getLogger(__name__)

EXPERT_TOKENS_INTERVAL_S = 1.0


class EngineCore:
    """Runs requests to their end, step by step. Not thread-safe: one thread calls everything.

    With ``async_scheduling`` a step is planned and started while the device still computes the one before, whose result
    is taken afterwards; so the host's work for a step, and that of whoever takes the outputs, costs the device no time.

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
                kv_listener=make_kv_listener(plugins.kv_cache_listeners(), self.config),
                runs_whole=self._runs_whole,
            )
        except BaseException:
            self._executor.shutdown()
            raise
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        """Steps that the workers have been given and whose results have not been taken, oldest first."""
        self._max_in_flight = 2 if self.config.scheduler.async_scheduling else 1
        self._num_steps = 0
        self._last_step_s = 0.0
        self._expert_tokens: dict[str, list[int]] = {}
        self._expert_tokens_step, self._expert_tokens_s = -1, 0.0
        """When they were read: the number of steps by then, and the time."""

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.timings[phase] = time.perf_counter() - started

    def _allocate_kv_cache(self, config: EngineConfig) -> tuple[EngineConfig, KVCacheConfig]:
        """The configuration with the context length that really fits, and the pool."""
        specs = self._executor.kv_cache_specs()
        self._runs_whole = any(spec.sees_later_tokens for spec in specs.values())
        if self._runs_whole:
            config = _with_steps_for_whole_prompts(config)
        available_bytes = self._executor.available_kv_bytes()
        kept_bytes = config.cache.prefix_cache_bytes
        size = size_pool(specs, available_bytes, config.model, config.scheduler, kept_bytes)
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
        return self._scheduler.has_work() or bool(self._in_flight)

    def step(self) -> list[EngineOutput]:
        """Moves every scheduled request forward. What a single request breaks fails that request only.

        Raises `WorkerDiedError` when a worker is gone: then nothing can be saved.
        """
        started = time.perf_counter()
        try:
            plan = self._scheduler.schedule()
            outputs = [] if plan is None else self._start(plan)
            if self._in_flight and (plan is None or len(self._in_flight) >= self._max_in_flight):
                outputs += self._take_oldest()
        except WorkerDiedError:
            raise
        except BaseException as interrupt:  # plans are answered, so that the engine can go on afterwards
            self._fail_in_flight(interrupt)
            raise
        self._last_step_s = time.perf_counter() - started
        return outputs

    def _start(self, plan: StepPlan) -> list[EngineOutput]:
        """Returns outputs only if starting it raised, after all steps before it have been taken."""
        self._num_steps += 1
        try:
            self._executor.execute(plan)
            self._in_flight.append((plan, self._executor.sample()))
        except WorkerDiedError:
            raise
        except Exception as error:
            _log_failure(plan)
            outputs = []
            while self._in_flight:
                outputs += self._take_oldest()
            return outputs + self._scheduler.fail_step(plan, error)
        except BaseException as interrupt:
            self._fail_in_flight(interrupt)
            self._scheduler.fail_step(plan, interrupt)
            raise
        return []

    def _take_oldest(self) -> list[EngineOutput]:
        plan, pending = self._in_flight[0]
        try:
            result = pending.result()
        except WorkerDiedError:
            raise
        except Exception as error:
            _log_failure(plan)
            return self._fail_in_flight(error)
        self._in_flight.popleft()
        return self._scheduler.update(plan, result)

    def _fail_in_flight(self, error: BaseException) -> list[EngineOutput]:
        """Of a step that raised and of those started after it, which were computed from what it should have given."""
        outputs = []
        while self._in_flight:
            plan, _ = self._in_flight.popleft()
            outputs += self._scheduler.fail_step(plan, error)
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats.of(
            self._scheduler.stats(),
            num_steps=self._num_steps,
            last_step_s=self._last_step_s,
            expert_tokens=self._read_expert_tokens() if self.config.count_expert_tokens else {},
        )

    def _read_expert_tokens(self) -> dict[str, list[int]]:
        """Reading them waits for the device, so it is done once a second, and when the last step is over."""
        now = time.monotonic()
        is_due = not self.has_work() or now - self._expert_tokens_s >= EXPERT_TOKENS_INTERVAL_S
        if is_due and self._expert_tokens_step != self._num_steps:
            self._expert_tokens = self._executor.expert_tokens()
            self._expert_tokens_step, self._expert_tokens_s = self._num_steps, now
        return self._expert_tokens

    def profile(self, run: Callable[[], object]) -> str | None:
        """As `DeviceRuntime.profile`, of the rank in this process."""
        return self._executor.profile(run)

    def check_health(self) -> None:
        """Raises `WorkerDiedError` when a worker is gone."""
        self._executor.check_health()

    def shutdown(self) -> None:
        """Ends the workers and frees the device. May be called twice."""
        self._executor.shutdown()


def _with_steps_for_whole_prompts(config: EngineConfig) -> EngineConfig:
    """Where a prompt is computed in one step it can be no longer than that."""
    budget, length = config.scheduler.max_num_batched_tokens, config.model.max_model_len
    if length <= budget:
        return config
    if config.model.is_max_model_len_explicit:
        raise ConfigError(
            "max_num_batched_tokens",
            f"max_num_batched_tokens is {budget}, but the model reads a prompt of up to max_model_len {length} tokens "
            "in one step: raise max_num_batched_tokens, or lower max_model_len",
        )
    logger.warning(
        "max_model_len is lowered from %d to %d tokens: the model reads a prompt in one step, which has no more",
        length,
        budget,
    )
    return replace(config, model=replace(config.model, max_model_len=budget))


def _log_failure(plan: StepPlan) -> None:
    logger.exception("step %d with %d requests raised", plan.step_id, len(plan.num_scheduled_tokens))


def _contributed_policy(name: str, targets: Mapping[str, str]) -> dict[str, SchedulerPolicy]:
    """The policy of that name, when it is a plugin's."""
    if name not in targets:
        return {}
    return {name: import_target(targets[name], f"the scheduler policy {name!r}")()}
