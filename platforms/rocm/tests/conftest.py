"""Where the tests of this platform run, and machines that it may find there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from triton_device import device

__all__ = ["device", "write_node"]

GIB = 1 << 30


@pytest.fixture
def write_node(tmp_path: Path) -> Callable[..., Path]:
    """Writes a node of the driver's topology below ``tmp_path / "sys"``; a processor's without ``version``."""

    def write(
        number: int, version: int = 0, *, wave: int = 64, cus: int = 304, uid: int = 0, gib: int = 192
    ) -> Path:
        node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(number)
        simds = 4 * cus if version else 0
        lines = [
            f"simd_count {simds}",
            "simd_per_cu 4",
            f"gfx_target_version {version}",
            f"wave_front_size {wave}",
        ]
        lines += [f"unique_id {uid}"] if uid else []
        banks = [(1 if version else 0, gib * GIB)]
        for index, (heap, size) in enumerate(banks):
            bank = node / "mem_banks" / str(index)
            bank.mkdir(parents=True)
            (bank / "properties").write_text(f"heap_type {heap}\nsize_in_bytes {size}\nflags 0\n")
        (node / "properties").write_text("\n".join(lines) + "\n")
        return node

    return write
