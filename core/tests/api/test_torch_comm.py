"""Collectives between two real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RANK = """
import sys, torch
from inferplane.api import ProcessGroup
from inferplane.api.torch_comm import TorchCommunicator
rank = int(sys.argv[1])
torch.set_num_threads(1)
comm = TorchCommunicator(ProcessGroup(rank, 2, sys.argv[2]), "gloo", timeout_s=60)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    mine = torch.arange(6, dtype=dtype).reshape(2, 3) + 10 * rank
    assert comm.all_reduce(mine.clone()).tolist() == [[10, 12, 14], [16, 18, 20]]
    assert comm.all_reduce(mine.clone().t()).tolist() == [[10, 16], [12, 18], [14, 20]]
    assert comm.all_gather(mine, 0).tolist() == [[0, 1, 2], [3, 4, 5], [10, 11, 12], [13, 14, 15]]
    assert comm.all_gather(mine, 1).tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
    assert comm.all_gather(mine.t(), -1).shape == (3, 4)
torch.manual_seed(rank)
print(comm.all_reduce(torch.randn(1000)).numpy().tobytes().hex())
try:
    TorchCommunicator(ProcessGroup(rank, 2, sys.argv[2]), "gloo")
except RuntimeError as error:
    assert "needs its own process" in str(error)
else:
    raise SystemExit("a second group was not refused")
comm.close()
comm.close()
"""


def test_two_ranks(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/rendezvous"
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), method], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs[0] == outputs[1] != ""  # bit for bit the same sum
