"""How many cores this process may use: its affinity and the CPU quota of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

from inferplane.api.cgroup import cgroup_folders, read_figure


def allowed_cores() -> list[int]:
    """Core ids that the scheduler may put this process on."""
    try:
        return sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not every system has it, and a sandbox may forbid it
        return list(range(os.cpu_count() or 1))


def usable_cores(root: Path = Path("/")) -> int:
    """At least 1. A quota of 1.5 cores counts as 1: threads beyond a quota only wait for each other."""
    cores = len(allowed_cores())
    for folder in cgroup_folders("cpu", root):
        if (quota := _quota(folder)) is not None:
            cores = min(cores, int(quota))
    return max(1, cores)


def _quota(folder: Path) -> float | None:
    """Cores worth of time that one control group grants; None when it sets no bound."""
    try:
        allowance, period = (folder / "cpu.max").read_text().split()
        return None if allowance == "max" else int(allowance) / int(period)
    except (OSError, ValueError):
        pass
    allowance_us = read_figure(folder / "cpu.cfs_quota_us")
    period_us = read_figure(folder / "cpu.cfs_period_us")
    if allowance_us is None or not period_us or allowance_us < 0:
        return None
    return allowance_us / period_us
