"""The worker: one rank of one model on one device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inferplane.api.comm import ProcessGroup
from inferplane.api.device import DeviceDescriptor
from inferplane.api.kv import KVCacheConfig, KVCacheSpec

if TYPE_CHECKING:
    from inferplane.api.platform import Platform
    from inferplane.api.providers import Providers
    from inferplane.config import EngineConfig
    from inferplane.plan import StepPlan, StepResult


@dataclass(frozen=True)
class WorkerContext:
    """What a worker is made from; the same on every rank but for ``group.rank``."""

    config: EngineConfig
    platform: Platform
    device: DeviceDescriptor
    plugins: Providers
    group: ProcessGroup


class PendingStep(ABC):
    """A step whose tokens the device may still be choosing."""

    @abstractmethod
    def result(self) -> StepResult:
        """Blocks until the step is done, and raises what it raised. Called once, in the order of the steps."""


class DoneStep(PendingStep):
    """A step whose result is there."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class Worker(ABC):
    """Executes plans. Calls come from one thread, in the order of the methods here.

    `inferplane.api.worker.ModelWorker` is the whole of it over the core's runner; a platform's worker class usually
    derives from that and overrides what its device does differently.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @abstractmethod
    def set_up(self) -> None:
        """Takes the device. Nothing here waits for other ranks: one that cannot have its device must be able to say so
        before the others wait for it."""

    def join_group(self) -> None:
        """Joins the process group; blocks until every rank has. Called when every rank is set up."""
        return

    @abstractmethod
    def load_model(self) -> None: ...

    @abstractmethod
    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """What each attention layer keeps, by layer name."""

    @abstractmethod
    def available_kv_bytes(self) -> int:
        """Memory that may go to the KV cache: what is left once the largest step has been accounted for."""

    @abstractmethod
    def init_kv_cache(self, kv_config: KVCacheConfig) -> None: ...

    def warm_up(self) -> None:
        """Whatever makes the first real step as fast as the next (capture, compilation, packing)."""
        return

    @abstractmethod
    def execute(self, plan: StepPlan) -> None:
        """Applies the plan to the batch and runs the model up to the logits."""

    @abstractmethod
    def sample(self) -> PendingStep:
        """Of the plan executed last, on rank 0 only. A call of its own, so that a mask or drafts can come between.

        The tokens go to the other ranks' `accept`, and some do where choosing them raises: the step has failed then,
        but the others wait.

        The next plan may come before the result of this one has been asked for. It then names tokens that were sampled
        but whose values only the device knows, one for each request, which the worker takes from there. It may also
        remove requests, and give their places to others, before the results of their last steps are asked for.
        """

    def accept(self) -> None:
        """In place of `sample` on every rank but the first: takes what rank 0 samples for the plan executed last, by
        the group's communicator. Their values need never reach this rank's host: a plan that computes a token anew
        brings it along."""
        raise NotImplementedError(
            f"{type(self).__name__} runs on one rank only: it does not implement accept"
        )

    def expert_tokens(self) -> dict[str, list[int]]:
        """How many tokens each expert got since the start, by the name of its router: all ranks count the same. Empty
        without ``count_expert_tokens``, or without experts."""
        return {}

    def profile(self, run: Callable[[], object]) -> str | None:
        """As `DeviceRuntime.profile`; None, with nothing called, where there is no profiler."""
        return None

    @abstractmethod
    def close(self) -> None: ...


def __getattr__(name: str) -> Any:
    if name == "ModelWorker":  # imports torch, which a plugin module must not do
        from inferplane.runner.worker import ModelWorker

        return ModelWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
