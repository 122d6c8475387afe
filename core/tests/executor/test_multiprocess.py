"""Ranks in processes of their own: they follow, they fail together or all at once, and they leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from inferplane.api.kv import KVCacheConfig, KVCacheGroup
from inferplane.executor import WorkerDiedError
from inferplane.executor import multiprocess as multiprocess_module
from inferplane.executor import rank_processes as rank_processes_module
from inferplane.executor.multiprocess import MultiprocessExecutor
from inferplane.plan import StepPlan
from inferplane.plugins import load_plugins

pytestmark = pytest.mark.usefixtures("sockets_platform")


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sockets live in a folder where a leftover shows. Not below tmp_path, whose name is too long for a socket; but
    after it, because pytest makes its folders in the temporary one of the moment."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def quick_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (multiprocess_module, rank_processes_module):
        monkeypatch.setattr(module, "DISAGREEMENT_S", 0.5)


@pytest.fixture
def start(socket_config, own_temporary_folder: Path, process_is_alive):
    started: list[tuple[MultiprocessExecutor, list[int]]] = []

    def make(world_size: int) -> MultiprocessExecutor:
        executor = MultiprocessExecutor(socket_config(world_size), load_plugins(quiet=True))
        started.append((executor, []))
        executor.start()
        started[-1][1].extend(executor.rank_pids)
        spec = executor.kv_cache_specs()["a"]
        executor.init_kv_cache(KVCacheConfig(5, (KVCacheGroup(("a", "b"), spec),)))
        executor.warm_up()
        return executor

    yield make
    for executor, pids in started:
        executor.shutdown()
        executor.shutdown()
        assert not any(map(process_is_alive, pids))
    assert list(own_temporary_folder.iterdir()) == []


def step(executor: MultiprocessExecutor, *orders: str) -> int:
    executor.execute(StepPlan(step_id=1, removed_request_ids=list(orders)))
    return executor.sample().result().sampled_token_ids["a"][0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_takes_part_and_learns_what_rank_0_sampled(start, world_size: int, capfd):
    executor = start(world_size)
    assert executor.available_kv_bytes() == 1000 - (world_size - 1)
    total = 5 * world_size  # after the warm-up's all-reduce on every rank
    expected = total * world_size
    assert step(executor) == expected
    for _ in range(3):
        expected += (world_size - 1) * (expected + 10)  # rank 0 has its sum, the others what they accepted
        assert step(executor) == expected
    executor.check_health()
    out, err = capfd.readouterr()
    assert out == "loading 0\n", "other ranks leave standard output to the program"
    assert "loading 1" in err


@pytest.mark.parametrize(
    ("order", "message"),
    [("raise@all", "order on rank 0"), ("choke@0", "rank 0 chose nothing")],
    ids=["that all ranks share", "where rank 0 samples"],
)
def test_an_error_that_ranks_agree_about_is_one_of_the_step(order: str, message: str, start):
    executor = start(3)
    for _ in range(3):
        with pytest.raises(ValueError, match=message):
            step(executor, order)
        before = step(executor)
        executor.check_health()
    assert before > 0


def test_an_interrupt_within_a_step_ends_the_executor(start):
    executor = start(2)
    with pytest.raises(KeyboardInterrupt):
        step(executor, "interrupt@0")
    with pytest.raises(WorkerDiedError, match="rank 0 was interrupted within step 1"):
        step(executor)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (KeyboardInterrupt, KeyboardInterrupt, "rank 0 was interrupted within step 2"),
        (zmq.ZMQError, WorkerDiedError, "rank 0 did not send step 2: ZMQError"),
    ],
)
def test_a_step_that_not_every_rank_may_have_ends_the_executor_at_once(
    start,
    monkeypatch: pytest.MonkeyPatch,
    process_is_alive,
    becomes_true,
    error: type[BaseException],
    raised: type[BaseException],
    message: str,
):
    executor = start(2)
    step(executor)
    pids = executor.rank_pids
    send_encoded = rank_processes_module.RankProcesses.send_encoded

    def send_and_raise(processes: rank_processes_module.RankProcesses, command: bytes) -> None:
        send_encoded(processes, command)
        raise error

    with monkeypatch.context() as patch, pytest.raises(raised):
        patch.setattr(rank_processes_module.RankProcesses, "send_encoded", send_and_raise)
        step(executor)
    assert becomes_true(lambda: not any(map(process_is_alive, pids)), 5.0)
    for call in (executor.check_health, lambda: step(executor)):
        with pytest.raises(WorkerDiedError, match=message):
            call()


@pytest.mark.timeout(30)
def test_an_interrupt_before_a_step_is_sampled_ends_the_executor_with_the_next(start):
    """The other ranks wait for tokens that never come."""
    executor = start(2)
    step(executor)
    executor.execute(StepPlan(step_id=1))
    with pytest.raises(WorkerDiedError, match="rank 0 was interrupted within step 2"):
        step(executor)


@pytest.mark.timeout(30)
def test_ranks_that_wait_for_an_interrupted_one_are_ended_at_once(start):
    executor = start(2)
    executor.execute(StepPlan(step_id=1))
    started = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - started < rank_processes_module.EXIT_S


def test_a_plan_that_cannot_travel_is_an_error_of_the_step(start):
    executor = start(2)
    with pytest.raises(TypeError, match="object"):
        executor.execute(StepPlan(step_id=1, removed_request_ids=[object()]))  # type: ignore[list-item]
    assert step(executor) == 20  # the first of all ranks, as above


def test_a_step_ahead_needs_no_result(start):
    executor, waiting = start(2), start(2)
    expected = [step(waiting) for _ in range(4)]
    pending = []
    for _ in expected:
        executor.execute(StepPlan(step_id=1))
        pending.append(executor.sample())
    assert [each.result().sampled_token_ids["a"][0] for each in pending] == expected


@pytest.mark.parametrize("order", ["raise@1", "raise@2"])
def test_a_rank_that_fails_alone_ends_the_executor_with_its_traceback(start, quick_to_judge, order: str):
    executor = start(3)
    started = time.monotonic()
    with pytest.raises(
        WorkerDiedError,
        match=rf"rank {order[-1]} failed step 1, .*: plugin 'sockets' .* ValueError: order on rank",
    ):
        step(executor, order)
    assert time.monotonic() - started < 10
    for call in (executor.check_health, executor.sample, lambda: step(executor)):
        with pytest.raises(WorkerDiedError):
            call()


@pytest.mark.parametrize("order", ["raise@0", "late@0"])
def test_rank_0_failing_alone_ends_the_executor(start, quick_to_judge, order: str):
    """Before the collective, in which the other then waits, or after it, when the other has done its step."""
    executor = start(2)
    with pytest.raises(
        WorkerDiedError,
        match=r"rank 0 failed step 1, which not all of the 2 ranks failed: plugin 'sockets' .* ValueError",
    ):
        step(executor, order)
    with pytest.raises(WorkerDiedError):
        executor.check_health()


def test_a_failure_after_the_last_collective_is_not_passed_over(start, becomes_true):
    executor = start(2)
    step(executor, "late@1")

    def is_broken() -> bool:
        try:
            executor.check_health()
        except WorkerDiedError as error:
            return "after the collective" in str(error)
        return False

    assert becomes_true(is_broken, 5.0)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_death_within_a_step_does_not_hang_the_others(start, rank: int):
    executor = start(3)
    step(executor)
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match=rf"rank {rank} died \(exit status 9\)"):
        step(executor, f"die@{rank}")
    assert time.monotonic() - started < 10


def test_a_death_between_steps_is_noticed_within_a_second(start, becomes_true):
    executor = start(2)
    os.kill(executor.rank_pids[0], signal.SIGKILL)

    def is_noticed() -> bool:
        try:
            executor.check_health()
        except WorkerDiedError as error:
            return "rank 1 died (signal 9)" in str(error)
        return False

    assert becomes_true(is_noticed, 3.0)  # a watch interval is a fifth of a second; machines can be busy
    with pytest.raises(WorkerDiedError):
        step(executor)


@pytest.mark.parametrize("where", ["init", "set_up", "load_model"])
def test_a_rank_that_cannot_start_says_why(start, monkeypatch: pytest.MonkeyPatch, where: str):
    monkeypatch.setenv("FAIL_AT", f"{where}@1")
    with pytest.raises(
        WorkerDiedError,
        match=rf"rank 1 failed in \w+: plugin 'sockets' .*: RuntimeError: no {where} for rank 1\nTraceback",
    ):
        start(2)


def test_a_rank_that_dies_while_starting_is_missed(start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DIE_AT", "load_model@1")
    with pytest.raises(WorkerDiedError, match=r"rank 1 died \(exit status 7\)"):
        start(2)


def test_an_error_of_rank_0_while_starting_keeps_its_type(start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FAIL_AT", "load_model@0")
    with pytest.raises(RuntimeError, match="no load_model for rank 0") as caught:
        start(2)
    assert not isinstance(caught.value, WorkerDiedError)


PARENT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # even where whoever runs the tests ignores it
from inferplane.config import DeviceConfig, EngineConfig, ModelConfig, ParallelConfig
from inferplane.executor.multiprocess import MultiprocessExecutor
from inferplane.plugins import load_plugins
sizes = dict(max_model_len=64, vocab_size=8)
model = ModelConfig(model="m", path="m", hf_config={}, architecture="A", dtype="float32", **sizes)
config = EngineConfig(model=model, device=DeviceConfig("sockets"), parallel=ParallelConfig(3))
executor = MultiprocessExecutor(config, load_plugins(quiet=True))
executor.start()
print("pids", *executor.rank_pids, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_ranks_do_not_outlive_their_parent(
    own_temporary_folder: Path, process_is_alive, becomes_true, end: signal.Signals
):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    line = next(line for line in parent.stdout if line.startswith("pids"))
    pids = [int(pid) for pid in line.split()[1:]]
    assert all(map(process_is_alive, pids))
    parent.send_signal(end)
    parent.wait(10)
    parent.stdout.close()
    assert becomes_true(lambda: not any(map(process_is_alive, pids)), 5.0)
    assert becomes_true(lambda: list(own_temporary_folder.iterdir()) == [], 1.0)


def test_files_of_the_current_folder_are_not_taken_for_modules(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "zmq.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(folder)
    assert start(2).available_kv_bytes() == 999
