"""Memory figures read from a made-up /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from inferplane.api.cgroup import cgroup_folders
from inferplane.api.host_memory import host_memory

GIB = 1 << 30


def machine(
    root: Path, membership: str | None, files: dict[str, str], total_gib: int = 24, free_gib: int = 20
) -> Path:
    (root / "proc/self").mkdir(parents=True)
    kib = 1 << 20
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {total_gib * kib} kB\nMemFree:  1 kB\n"
        f"MemAvailable:   {free_gib * kib} kB\nHugePages_Total:  0\n"
    )
    if membership is not None:
        (root / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups(tmp_path: Path) -> None:
    info = host_memory(machine(tmp_path, None, {}))
    assert (info.total_bytes, info.available_bytes) == (24 * GIB, 20 * GIB)


@pytest.mark.parametrize("membership", ["0::/", "0::/system.slice/of/another/namespace\n"])
def test_the_limit_of_a_container(tmp_path: Path, membership: str) -> None:
    """The path may be the host's, which the container does not see."""
    files = {
        "memory.max": f"{2 * GIB}\n",
        "memory.current": f"{GIB}\n",
        "memory.stat": f"anon {GIB // 2}\nfile {GIB // 2}\ninactive_file {GIB // 4}\n",
    }
    info = host_memory(machine(tmp_path, membership, files))
    assert (info.total_bytes, info.available_bytes) == (2 * GIB, GIB + GIB // 4)


def test_the_tightest_group_on_the_way_up_holds(tmp_path: Path) -> None:
    files = {
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "5\n",
        "a/memory.max": f"{8 * GIB}\n",
        "a/memory.current": f"{7 * GIB}\n",
    }
    info = host_memory(machine(tmp_path, "0::/a/b\n", files))
    assert (info.total_bytes, info.available_bytes) == (8 * GIB, GIB)


def test_the_first_version_of_control_groups(tmp_path: Path) -> None:
    membership = "12:cpu,cpuacct:/job\n5:memory:/job\n1:name=systemd:/\n"
    files = {
        "memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
        "memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
        "memory/job/memory.stat": f"total_inactive_file {GIB}\ninactive_file 1\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    info = host_memory(machine(tmp_path, membership, files))
    assert (info.total_bytes, info.available_bytes) == (4 * GIB, 2 * GIB)


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"}
    assert host_memory(machine(tmp_path, "0::/", files)).available_bytes == 0


def test_a_limit_above_the_machine_changes_nothing(tmp_path: Path) -> None:
    files = {"memory.max": f"{100 * GIB}", "memory.current": f"{GIB}"}
    info = host_memory(machine(tmp_path, "0::/", files))
    assert (info.total_bytes, info.available_bytes) == (24 * GIB, 20 * GIB)


def test_a_system_without_these_files_asks_the_library(tmp_path: Path) -> None:
    assert host_memory(tmp_path).total_bytes == psutil.virtual_memory().total
    assert cgroup_folders("memory", tmp_path) == []


def test_this_machine() -> None:
    info = host_memory()
    assert 0 < info.available_bytes <= info.total_bytes <= psutil.virtual_memory().total
