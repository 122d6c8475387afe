"""`MultiprocessExecutor`: rank 0 in this process, every other rank in one of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inferplane.api.comm import ProcessGroup
from inferplane.api.kv import KVCacheConfig, KVCacheSpec
from inferplane.api.worker import PendingStep, Worker
from inferplane.config import EngineConfig
from inferplane.executor.base import WorkerDiedError, make_worker
from inferplane.executor.local import with_progress
from inferplane.executor.messages import Call, DidFail, Execute, InitKVCache, Start, encode
from inferplane.executor.rank_processes import DISAGREEMENT_S, RankProcesses, StepState
from inferplane.plan import StepPlan, StepResult
from inferplane.plugins.blame import what_failed

if TYPE_CHECKING:
    from inferplane.plugins import PluginSet


class MultiprocessExecutor:
    """An `Executor` of many ranks.

    **Who samples.** Rank 0 alone; the others get its tokens from device to device, in a collective behind those of the
    model, so that nobody waits for them on a host. The alternative, that every rank samples the same from gathered
    logits, costs each of them the sampler's time and is right only while every logits processor is deterministic and
    every device computes alike.

    **In which order.** Every rank gets the plans in the order in which rank 0 executes them, and obeys them one after
    another: a step's collectives, then that of its tokens, then the next step's. So a step ahead needs no more than
    that rank 0 sends it.

    **When a step raises.** Choosing tokens is rank 0's own affair: what it raises there is an error of the step, and
    the others go on. Any other error that follows from the plan (one that does not fit the batch, a model that refuses
    its input) is raised by every rank alike, at the same place. So when rank 0 raises, it asks the others: if they have
    raised where they should have, and not where they should not, the error is the caller's to handle and the next plan
    runs on every rank. In any other case, a rank that raised alone or died, the others may be inside a collective that
    never completes, and what each has computed is no longer known: all ranks are ended, which makes a waiting
    collective on rank 0 raise, and the executor raises `WorkerDiedError` from then on. That takes up to
    `DISAGREEMENT_S`; after a death, less than a second. It relies on a communicator that raises when its peers are
    gone, as gloo does.

    A rank that dies while the ranks join their process group is noticed when the communicator's own timeout ends.
    """

    def __init__(self, config: EngineConfig, plugins: PluginSet, progress: bool = False) -> None:
        self._config = with_progress(config, progress)
        self._plugins = plugins
        self._processes: RankProcesses | None = None
        self._worker: Worker | None = None
        self._num_steps = 0
        self._is_within_step = False
        """The other ranks may have a step that they cannot end without this one, which has yet to sample it. An
        interrupt between `execute` and `sample` leaves it so."""

    def start(self) -> None:
        processes = self._processes = RankProcesses(self._config.parallel.world_size)
        processes.start()
        call_id = processes.next_call_id()
        processes.send(Start(call_id, self._config, processes.init_method))
        group = ProcessGroup(0, self._config.parallel.world_size, processes.init_method)
        self._worker = make_worker(self._config, self._plugins, group)
        self._collect(call_id, "start")
        for method in ("set_up", "join_group", "load_model"):
            self._call(method)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self._own_worker().kv_cache_specs()

    def available_kv_bytes(self) -> int:
        return min(self._call("available_kv_bytes"))

    def init_kv_cache(self, kv_config: KVCacheConfig) -> None:
        processes = self._running()
        call_id = processes.next_call_id()
        groups = [(list(group.layer_names), group.pool) for group in kv_config.groups]
        num_blocks = [kv_config.num_blocks, *kv_config.more_pools]
        processes.send(InitKVCache(call_id, num_blocks, groups))
        self._own_worker().init_kv_cache(kv_config)
        self._collect(call_id, "init_kv_cache")

    def warm_up(self) -> None:
        self._call("warm_up")

    def execute(self, plan: StepPlan) -> None:
        processes, worker = self._running(), self._own_worker()
        if self._is_within_step:  # an interrupt came before all of it was sampled
            self._end_interrupted()
            processes.check()
        self._num_steps += 1
        number = self._num_steps
        message = encode(Execute(number, plan))  # raises before any rank has it
        processes.note_step(number, StepState.RUNNING)
        self._is_within_step = True
        self._send_step(message)
        with self._settling(do_all_raise=True):
            worker.execute(plan)
        processes.note_step(number, StepState.DONE)

    def sample(self) -> PendingStep:
        processes, worker = self._running(), self._own_worker()
        processes.check()
        with self._settling(do_all_raise=False):
            pending = _PendingOfRanks(worker.sample(), processes)
        self._is_within_step = False
        return pending

    def expert_tokens(self) -> dict[str, list[int]]:
        return self._own_worker().expert_tokens()

    def profile(self, run: Callable[[], object]) -> str | None:
        return self._own_worker().profile(run)

    def check_health(self) -> None:
        self._running().check()

    def shutdown(self) -> None:
        # The others first: a rank that ends on its own closes its side of the group in peace.
        if self._processes is not None:
            if self._is_within_step:  # they wait for this rank, and would not hear that they should end
                self._end_interrupted()
            self._processes.stop()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    @property
    def rank_pids(self) -> list[int]:
        """Process ids of ranks 1 and up."""
        return self._running().pids

    def _running(self) -> RankProcesses:
        if self._processes is None:
            raise RuntimeError("the executor is not started")
        return self._processes

    def _own_worker(self) -> Worker:
        self._running().check()
        if self._worker is None:
            raise RuntimeError("the executor is not started")
        return self._worker

    def _call(self, method: str) -> list[Any]:
        """Calls a worker's method on every rank at once; the results in rank order."""
        processes = self._running()
        call_id = processes.next_call_id()
        processes.send(Call(call_id, method))
        own = getattr(self._own_worker(), method)()
        return [own, *self._collect(call_id, method)]

    def _collect(self, call_id: int, what: str) -> list[int | None]:
        answers = self._running().answers(call_id)
        for answer in answers:
            if answer.error is not None:
                reason = f"rank {answer.rank} failed in {what}: {answer.error}"
                self._running().declare_broken(reason)
                raise WorkerDiedError(reason)
        return [answer.value for answer in answers]

    def _send_step(self, message: bytes) -> None:
        """To every rank; where that fails, some may have the step that others have not, and all are ended."""
        processes = self._running()
        try:
            processes.send_encoded(message)
        except WorkerDiedError:
            raise
        except Exception as error:
            reason = f"rank 0 did not send step {self._num_steps}: {what_failed(error)}"
            processes.declare_broken(reason)
            raise WorkerDiedError(reason) from error
        except BaseException:
            self._end_interrupted()
            raise

    @contextmanager
    def _settling(self, do_all_raise: bool) -> Iterator[None]:
        """An error within is raised once the other ranks have said that they raised in this step, too, or that they did
        not. Else `WorkerDiedError` is, with all ranks ended."""
        processes = self._running()
        try:
            yield
        except Exception as error:
            if do_all_raise:
                processes.note_step(self._num_steps, StepState.RAISED)
            self._settle(error, do_all_raise)
            self._is_within_step = False
            raise
        except BaseException:
            self._end_interrupted()
            raise

    def _end_interrupted(self) -> None:
        """The others know nothing of an interrupt of this rank."""
        self._running().declare_broken(f"rank 0 was interrupted within step {self._num_steps}")

    def _settle(self, error: Exception, do_all_raise: bool) -> None:
        processes, number = self._running(), self._num_steps
        try:
            call_id = processes.next_call_id()
            processes.send(DidFail(call_id, number))
            answers = processes.answers(call_id, DISAGREEMENT_S)
        except WorkerDiedError as died:
            raise died from error
        world_size = self._config.parallel.world_size
        if len(answers) == world_size - 1 and all(answer.value == do_all_raise for answer in answers):
            processes.forget_step_failures()
            return
        reason = f"rank 0 failed step {number}, which not all of the {world_size} ranks failed: {what_failed(error)}"
        processes.declare_broken(reason)
        raise WorkerDiedError(reason) from error


@dataclass(frozen=True)
class _PendingOfRanks(PendingStep):
    """Of rank 0, whose device waits for those of the others."""

    pending: PendingStep
    processes: RankProcesses

    def result(self) -> StepResult:
        self.processes.check()
        try:
            return self.pending.result()
        except Exception as error:
            try:
                self.processes.check()
            except WorkerDiedError as died:
                raise died from error
            raise
