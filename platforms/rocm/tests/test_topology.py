"""The driver's view of the GPUs, on trees of files like its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from inferplane_rocm.topology import DriverError, Gpu, architecture_of, driver_version, read_gpus

GIB = 1 << 30


@pytest.fixture
def kfd(tmp_path: Path) -> Path:
    device = tmp_path / "kfd"
    device.touch()
    return device


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (90008, "gfx908"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
        (100306, "gfx1036"),
    ],
)
def test_names_of_instruction_sets(version: int, name: str) -> None:
    assert architecture_of(version) == name


def test_gpus_come_in_the_order_of_their_nodes(
    tmp_path: Path, kfd: Path, write_node: Callable[..., Path]
) -> None:
    write_node(0)
    write_node(10, 110000, wave=32, cus=96, gib=24)
    write_node(2, 90402, uid=0xAB12)
    assert read_gpus(tmp_path / "sys", kfd) == [
        Gpu("GPU-000000000000ab12", "gfx942", 304, 64, 192 * GIB),
        Gpu("", "gfx1100", 96, 32, 24 * GIB),
    ]


def test_a_node_that_a_container_hides_is_left_out(
    tmp_path: Path, kfd: Path, write_node: Callable[..., Path]
) -> None:
    """The driver's rules answer a read with an error; here the file is missing, which tests can do as any user."""
    write_node(1, 90402)
    (write_node(2, 90402) / "properties").unlink()
    assert [gpu.architecture for gpu in read_gpus(tmp_path / "sys", kfd)] == ["gfx942"]


def test_no_driver(tmp_path: Path, kfd: Path) -> None:
    with pytest.raises(DriverError, match="no AMD GPU driver on this machine"):
        read_gpus(tmp_path / "sys", kfd)


def test_a_container_without_the_device(tmp_path: Path, write_node: Callable[..., Path]) -> None:
    write_node(1, 90402)
    with pytest.raises(DriverError, match="start the container with the devices"):
        read_gpus(tmp_path / "sys", tmp_path / "absent")


def test_no_permission(
    tmp_path: Path, kfd: Path, write_node: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_node(1, 90402)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DriverError, match=r"no permission on .*kfd; add the user to the group"):
        read_gpus(tmp_path / "sys", kfd)


def test_the_drivers_version(tmp_path: Path) -> None:
    assert driver_version(tmp_path) is None
    module = tmp_path / "module/amdgpu"
    module.mkdir(parents=True)
    (module / "version").write_text("6.16.6\n")
    assert driver_version(tmp_path) == "6.16.6"
