"""Level 3: the communicator, where the platform has two devices or lives in host memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from inferplane_conformance.subject import Subject

TIMEOUT_S = 180


@pytest.fixture
def answers(subject: Subject, tmp_path: Path) -> list[dict[str, Any]]:
    """Of rank 0 and rank 1, each a process."""
    if fault := subject.pair_fault:
        pytest.skip(fault)
    command = [sys.executable, "-m", "inferplane_conformance.rank_probe", subject.name]
    init = f"file://{tmp_path / 'meeting'}"
    ranks = [
        subprocess.Popen(
            [*command, str(rank), init], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(stderr[-3000:] for _, stderr in outputs)
    return [json.loads(stdout.strip().splitlines()[-1]) for stdout, _ in outputs]


def test_collectives(answers: list[dict[str, Any]]) -> None:
    first, second = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 10
    expected = {
        "sum": first + second,
        "half_sum": first + second,
        "gather_0": torch.cat([first, second], 0),
        "gather_1": torch.cat([first, second], 1),
        "gather_view": torch.cat([first.t(), second.t()], 1),
        "broadcast": first.long()[0],
    }
    for rank, answer in enumerate(answers):
        assert answer["ranks"] == [rank, 2]
        for name, tensor in expected.items():
            assert answer[name] == tensor.tolist(), f"{name} on rank {rank}"


def test_a_sum_has_the_same_bits_on_every_rank(answers: list[dict[str, Any]]) -> None:
    """Ranks that round differently choose different tokens sooner or later."""
    assert answers[0]["sum_bits"] == answers[1]["sum_bits"]
