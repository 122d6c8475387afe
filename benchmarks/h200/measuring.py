"""What the tuning commands share: timing within a limit, and the table that `inferplane-kernels-cuda` ships."""

from __future__ import annotations

import dataclasses
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

    def __init__(self) -> None:
        self._end = 0.0
        self._kernels: dict[str, dict[str, dict[str, Any] | None]] = {}

    def start(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def keep(self, kernel: str, shape: str, config: Any) -> None:
        """A dataclass that was the fastest, or None where no entry is better than any."""
        entry = None if config is None else dataclasses.asdict(config)
        self._kernels.setdefault(kernel, {})[shape] = entry

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def time(self, what: str, calls: Sequence[Callable[[], object]], *, budget_s: float = 0.04) -> float:
        """Microseconds of one call; infinite where it fails or no time is left."""
        if self.is_over:
            return float("inf")
        try:
            micros = seconds_per_call(calls, budget_s=budget_s) * 1e6
        except Exception as error:
            print(f"{what} FAILED {type(error).__name__}: {str(error)[:160]}", flush=True)
            return float("inf")
        print(f"{what} {micros:.1f} us", flush=True)
        return micros

    def write(self, file: Path) -> None:
        """Also prints it, for whoever has the output alone."""
        capability = "".join(map(str, torch.cuda.get_device_capability()))
        found = {"capability": capability, "kernels": self._kernels}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=2) + "\n")
        print(json.dumps(found), flush=True)


def adopt(found: Path) -> None:
    """Puts what is in a file that `Measuring.write` made into the shipped table; other entries stay."""
    measured = json.loads(found.read_text())
    path = TABLES / f"sm{measured['capability']}.json"
    table = json.loads(path.read_text())
    for kernel, entries in measured["kernels"].items():
        known = table["kernels"].get(kernel, {}) | entries
        table["kernels"][kernel] = {shape: entry for shape, entry in known.items() if entry is not None}
    path.write_text(json.dumps(table, indent=2) + "\n")
    print(f"wrote {path}")


def randn(*shape: int, std: float = 0.05) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=std)
