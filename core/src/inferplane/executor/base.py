"""The executor contract, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from inferplane.api.comm import ProcessGroup
from inferplane.api.kv import KVCacheConfig, KVCacheSpec
from inferplane.api.worker import PendingStep, Worker, WorkerContext
from inferplane.config import ConfigError, EngineConfig
from inferplane.plan import StepPlan

if TYPE_CHECKING:
    from inferplane.plugins import PluginSet


class WorkerDiedError(RuntimeError):
    """A rank is gone or out of step with the others. Nothing can be executed any more; only `shutdown` is left."""


class Executor(Protocol):
    """Runs plans on every rank. Called from one thread, in the order of the methods here; `execute` and `sample`
    alternate, and `check_health` and `shutdown` may come at any time, the latter more than once.

    A plan may be executed before the result of the one before it was asked for, as `Worker.sample` says, where the
    configuration has ``async_scheduling``.

    What `execute`, `sample` or a pending step raise other than `WorkerDiedError` is an error of that step: the ranks
    agree, and take the next plan.
    """

    def start(self) -> None:
        """Brings up every rank and loads the model. Raises what the first rank to fail raised, or `WorkerDiedError`."""
        ...

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """What each attention layer keeps on one rank, by layer name."""
        ...

    def available_kv_bytes(self) -> int:
        """Of the rank that has least."""
        ...

    def init_kv_cache(self, kv_config: KVCacheConfig) -> None: ...

    def warm_up(self) -> None: ...

    def execute(self, plan: StepPlan) -> None: ...

    def sample(self) -> PendingStep: ...

    def expert_tokens(self) -> dict[str, list[int]]:
        """As `Worker.expert_tokens`, of rank 0. Only asked for with ``count_expert_tokens``."""
        ...

    def profile(self, run: Callable[[], object]) -> str | None:
        """As `DeviceRuntime.profile`, of rank 0; ``run`` calls the methods above."""
        ...

    def check_health(self) -> None:
        """Raises `WorkerDiedError` once a rank is known to be gone, within a second of its death."""
        ...

    def shutdown(self) -> None:
        """Ends every rank and leaves neither process nor file behind."""
        ...


def make_executor(config: EngineConfig, plugins: PluginSet, progress: bool = False) -> Executor:
    """The executor that ``config.parallel`` asks for, which a plugin may have brought; nothing is started yet.

    ``progress`` shows a bar while weights load, when the configuration wants one too. Raises `ConfigError`.
    """
    from inferplane.executor.local import LocalExecutor
    from inferplane.executor.multiprocess import MultiprocessExecutor
    from inferplane.plugins.target import import_target

    kind, world_size = config.parallel.executor, config.parallel.world_size
    contributed = plugins.executors()
    if kind in contributed:
        return import_target(contributed[kind], f"the executor {kind!r}")(config, progress)
    if kind not in ("auto", "local", "multiprocess"):
        known = ", ".join(["auto", "local", "multiprocess", *contributed])
        raise ConfigError("executor", f"executor must be one of {known}, got {kind!r}")
    if kind == "local" and world_size > 1:
        raise ConfigError(
            "executor", f"executor local runs one rank, but {world_size} are asked for; use multiprocess"
        )
    if world_size == 1:  # a rank 0 lives in this process either way
        return LocalExecutor(config, plugins, progress)
    return MultiprocessExecutor(config, plugins, progress)


def make_worker(config: EngineConfig, plugins: PluginSet, group: ProcessGroup) -> Worker:
    """The worker that the configured platform has for a rank of ``group``."""
    device = plugins.select_device(f"{config.device.platform}:{config.device.index}")
    platform = plugins.platform(device)
    return plugins.worker_class(device)(WorkerContext(config, platform, device, plugins, group))
