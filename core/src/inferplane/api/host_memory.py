"""How much host memory there is and how much may still be taken, limits of containers included."""

from __future__ import annotations

from pathlib import Path

from inferplane.api.cgroup import cgroup_folders, read_figure
from inferplane.api.device import MemoryInfo


def host_memory(root: Path = Path("/")) -> MemoryInfo:
    """The machine's memory, cut to what the control groups of this process allow.

    What is available counts page cache that the kernel would give up, in the machine and in each group.
    """
    total_bytes, available_bytes = _machine_memory(root)
    for folder in cgroup_folders("memory", root):
        limit = _first_figure(folder, "memory.max", "memory.limit_in_bytes")
        used = _first_figure(folder, "memory.current", "memory.usage_in_bytes")
        if limit is None:
            continue
        total_bytes = min(total_bytes, limit)
        if used is not None:
            available_bytes = min(available_bytes, limit - used + _reclaimable_bytes(folder))
    return MemoryInfo(total_bytes, max(0, min(available_bytes, total_bytes)))


def _machine_memory(root: Path) -> tuple[int, int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024
    except (OSError, KeyError, ValueError, IndexError):
        import psutil  # costs more to import than the file does to read

        memory = psutil.virtual_memory()
        return memory.total, memory.available


def _first_figure(folder: Path, *names: str) -> int | None:
    for name in names:
        if (figure := read_figure(folder / name)) is not None:
            return figure
    return None


def _reclaimable_bytes(folder: Path) -> int:
    """File pages not used lately: charged to the group, given up before an allocation fails."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    figures = dict(line.split() for line in lines if len(line.split()) == 2)
    return int(figures.get("total_inactive_file") or figures.get("inactive_file") or 0)
