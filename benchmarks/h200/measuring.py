"""What the tuning commands share: timing within a limit, and the table that `inferplane-kernels-cuda` ships."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import seconds_per_call

TABLES = Path(__file__).parents[2] / "kernels-cuda/src/inferplane_kernels_cuda/tuning"


class Measuring:
    """The entries found so far, and when to stop."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.kernels: dict[str, dict[str, Any]] = {}
        """Fields of a configuration, by kernel and shape."""

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def time(self, what: str, calls: Sequence[Callable[[], object]]) -> float:
        """Microseconds of one call; infinite where it fails or no time is left."""
        if self.is_over:
            return float("inf")
        try:
            micros = seconds_per_call(calls, budget_s=0.04) * 1e6
        except Exception as error:
            print(f"{what} FAILED {type(error).__name__}: {str(error)[:160]}", flush=True)
            return float("inf")
        print(f"{what} {micros:.1f} us", flush=True)
        return micros

    def write(self, file: Path) -> None:
        """Also prints it, for whoever has the output alone."""
        capability = "".join(map(str, torch.cuda.get_device_capability()))
        found = {"capability": capability, "kernels": self.kernels}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=2) + "\n")
        print(json.dumps(found), flush=True)


def adopt(found: Path) -> None:
    """Replaces the shipped table's kernels by those of a file that `Measuring.write` made."""
    measured = json.loads(found.read_text())
    path = TABLES / f"sm{measured['capability']}.json"
    table = json.loads(path.read_text())
    table["kernels"] |= {kernel: entries for kernel, entries in measured["kernels"].items() if entries}
    path.write_text(json.dumps(table, indent=2) + "\n")
    print(f"wrote {path}")


def randn(*shape: int, std: float = 0.05) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=std)
