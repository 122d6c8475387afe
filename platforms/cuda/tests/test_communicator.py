"""Sums over ranks, small and large, recorded and not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from inferplane.api import ProcessGroup
from inferplane_cuda.communicator import CudaCommunicator, have_access, is_small

NUM_RANKS = 2
SIZES = (8, 4096, 32 * 4096, 65 * 8192, 7)
"""Elements: from one vector to more than one kernel sums up, and a number that fills no vector."""


def test_what_one_kernel_sums_up() -> None:
    assert is_small(torch.zeros(4, 8, dtype=torch.bfloat16), 64)
    assert not is_small(torch.zeros(4, 9, dtype=torch.bfloat16), 64)
    assert not is_small(torch.zeros(7, dtype=torch.bfloat16), 64)
    assert not is_small(torch.zeros(0, dtype=torch.float32), 64)
    assert not is_small(torch.zeros(8, dtype=torch.float16), 64)


@pytest.fixture
def without_nccl(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Any process joins; each collective is one to set."""
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    return monkeypatch


def test_all_ranks_share_or_none(without_nccl: pytest.MonkeyPatch) -> None:
    """Of three GPUs the middle one can read both others, which cannot read each other."""
    without_nccl.setattr(torch.cuda, "can_device_access_peer", lambda one, other: abs(one - other) == 1)
    assert have_access(range(1, 3)) and not have_access(range(1, 4))
    for rank in range(3):
        comm = CudaCommunicator(ProcessGroup(rank, 3, "file:///none"), torch.device("cuda", 1 + rank))
        assert comm._shared is None


@pytest.mark.parametrize("failing", ["empty", "rendezvous", "a peer", "the group", None])
def test_memory_that_cannot_be_shared(failing: str | None, without_nccl: pytest.MonkeyPatch) -> None:
    """No rank waits in a rendezvous that another one does not come to, and a group that fails is left."""
    calls: list[Any] = []

    def call(name: str) -> None:
        calls.append(name)
        if name == failing:
            raise RuntimeError(name)

    def empty(*shape: int, **options: Any) -> torch.Tensor:
        call("empty")
        return torch.zeros(*shape, **options)

    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        call("the group")
        calls.append(tensor.item())
        if failing == "a peer":
            tensor.zero_()

    without_nccl.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    without_nccl.setattr(_symmetric_memory, "empty", empty)
    without_nccl.setattr(_symmetric_memory, "rendezvous", lambda *args: call("rendezvous"))
    without_nccl.setattr(dist, "all_reduce", all_reduce)
    without_nccl.setattr(CudaCommunicator.__base__, "close", lambda self: calls.append("close"))
    group, device = ProcessGroup(0, 2, "file:///none"), torch.device("cpu", 0)
    if failing == "the group":
        with pytest.raises(RuntimeError, match="the group"):
            CudaCommunicator(group, device)
    else:
        assert (CudaCommunicator(group, device)._shared is not None) == (failing is None)
    asked = ["empty", "the group"]
    assert (
        calls
        == {
            "empty": [*asked, 0],
            "a peer": [*asked, 1],
            "the group": [*asked, "close"],
            "rendezvous": [*asked, 1, "rendezvous", "the group", 0],
            None: [*asked, 1, "rendezvous", "the group", 1],
        }[failing]
    )


def part_of(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * size + rank)).to(dtype)


def run_rank(rank: int, folder: str) -> None:
    """Writes what each collective gave, as float64 on the host."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    comm = CudaCommunicator(ProcessGroup(rank, NUM_RANKS, f"file://{folder}/rendezvous"), device)
    has_shared = comm._shared is not None
    found: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            for size in SIZES:
                given = part_of(rank, size, dtype).to(device)
                found[f"{dtype}, {size}"] = comm.all_reduce(given.clone()).double().cpu()
        rows = torch.empty(3, 4096, dtype=torch.bfloat16, device=device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                comm.all_reduce(comm.all_reduce(rows.zero_()))
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                once = comm.all_reduce(rows + 1)
                twice = comm.all_reduce(once.clone())
        for turn in range(50):
            rows.fill_(rank + turn)
            graph.replay()
        torch.cuda.synchronize()
        found["graph"] = torch.stack((once, twice)).double().cpu()
        gathered = comm.all_gather(torch.full((2, 3), float(rank), device=device), 1)
        found["gather"] = gathered.double().cpu()
        tokens = torch.arange(3, device=device) + 1000 * (1 + rank)
        found["broadcast"] = comm.broadcast(tokens).cpu()
    torch.save((has_shared, found), f"{folder}/{rank}.pt")
    del graph
    comm.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < NUM_RANKS, reason="needs two GPUs")
def test_two_ranks(tmp_path: Path) -> None:
    assert os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1") == "1"
    torch.multiprocessing.spawn(run_rank, (str(tmp_path),), NUM_RANKS)
    (has_shared, first), (_, second) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(NUM_RANKS))
    assert has_shared == torch.cuda.can_device_access_peer(0, 1)
    for name in first:
        assert torch.equal(first[name], second[name]), name
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for size in SIZES:
            want = sum(part_of(rank, size, dtype).double() for rank in range(NUM_RANKS))
            torch.testing.assert_close(
                first[f"{dtype}, {size}"], want, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps
            )
    assert (first["graph"][0] == 49 + 50 + 2).all() and (first["graph"][1] == 2 * (49 + 50 + 2)).all()
    assert first["gather"].tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    assert first["broadcast"].tolist() == [1000, 1001, 1002]
