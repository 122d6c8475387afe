"""The drivers' view of the GPUs, on trees of files like theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferplane_xpu.cards import Card, DriverError, read_cards, require_loader

GIB = 1 << 30


class Machine:
    """Folders in place of /sys and /dev."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.dev = root / "sys", root / "dev"
        (self.dev / "dri").mkdir(parents=True)

    def add(
        self,
        address: str,
        device_id: int,
        driver: str,
        files: dict[str, int] | None = None,
        *,
        vendor: int = 0x8086,
        is_open: bool = True,
    ) -> None:
        number = 128 + len(list(self.sysfs.glob("class/drm/*")))
        device = self.sysfs / "devices/pci0000:00" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor:#06x}\n")
        (device / "device").write_text(f"{device_id:#06x}\n")
        (self.sysfs / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(self.sysfs / "bus/pci/drivers" / driver)
        for name, value in (files or {}).items():
            (device / name).parent.mkdir(parents=True, exist_ok=True)
            (device / name).write_text(f"{value}\n")
        node = self.sysfs / f"class/drm/renderD{number}"
        node.mkdir(parents=True)
        (node / "device").symlink_to(device)
        if is_open:
            (self.dev / f"dri/renderD{number}").touch()

    def read(self) -> list[Card]:
        return read_cards(self.sysfs, self.dev)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_cards_come_by_address_and_with_their_memory(machine: Machine) -> None:
    tiles = {f"tile{tile}/physical_vram_size_bytes": 64 * GIB for tile in (0, 1)}
    machine.add("0000:4d:00.0", 0x0BD5, "xe", tiles)
    machine.add("0000:03:00.0", 0x56A0, "i915", {"lmem_total_bytes": 16 * GIB})
    machine.add("0000:01:00.0", 0x2684, "other", vendor=0x10DE)
    machine.add("0000:00:02.0", 0x64A0, "xe")
    assert machine.read() == [
        Card("0000:00:02.0", 0x64A0, "xe", 0),
        Card("0000:03:00.0", 0x56A0, "i915", 16 * GIB),
        Card("0000:4d:00.0", 0x0BD5, "xe", 128 * GIB),
    ]


def test_no_gpu(machine: Machine) -> None:
    machine.add("0000:01:00.0", 0x2684, "other", vendor=0x10DE)
    with pytest.raises(DriverError, match="no Intel GPU with a driver"):
        machine.read()


def test_no_access(machine: Machine) -> None:
    machine.add("0000:03:00.0", 0x56A0, "xe", is_open=False)
    with pytest.raises(DriverError, match="no access to /dev/dri/renderD128; add the user to the group"):
        machine.read()


def test_no_loader() -> None:
    with pytest.raises(DriverError, match=r"the Level Zero loader \(libabsent\.so\) was not found"):
        require_loader("libabsent.so")
