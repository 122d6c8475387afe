"""What the platform says of machines with and without GPUs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inferplane.api import Supported, Unsupported
from inferplane.api.host_memory import host_memory
from inferplane_xpu import probing
from inferplane_xpu.cards import Card, DriverError
from inferplane_xpu.probing import probe

GIB = 1 << 30
INSIDE = Card("0000:00:02.0", 0x64A0, "xe", 0)
OLD = Card("0000:00:03.0", 0x3E92, "i915", 0)
ARC = Card("0000:03:00.0", 0x56A0, "i915", 16 * GIB)
MAX = Card("0000:4d:00.0", 0x0BD5, "xe", 128 * GIB)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A graphics unit inside the processor, two cards, and a torch that can use them."""
    monkeypatch.setattr(probing, "read_cards", lambda: [INSIDE, OLD, ARC, MAX])
    monkeypatch.setattr(probing, "require_loader", lambda: None)
    monkeypatch.setattr(probing, "why_not_built_for", lambda interface, name: None)
    monkeypatch.delenv(probing.VISIBLE, raising=False)
    return monkeypatch


def found() -> list[tuple[int, int]]:
    """Index and memory of each device."""
    answer = probe()
    assert isinstance(answer, Supported)
    return [(device.index, device.total_memory_bytes) for device in answer.devices]


def test_cards_go_before_what_is_inside_the_processor(machine: pytest.MonkeyPatch) -> None:
    assert found() == [(0, 16 * GIB), (1, 128 * GIB)]
    machine.setattr(probing, "read_cards", lambda: [INSIDE, OLD])
    assert found() == [(0, host_memory().total_bytes)]


@pytest.mark.parametrize(
    ("setting", "left"), [("1", [128]), ("1,0", [128, 16]), ("0.0,0.1,1.0", [16, 128]), ("1.1", [128])]
)
def test_the_visible_ones(machine: pytest.MonkeyPatch, setting: str, left: list[int]) -> None:
    machine.setenv("ZE_AFFINITY_MASK", setting)
    assert found() == [(index, gib * GIB) for index, gib in enumerate(left)]


def test_what_they_can_do(machine: pytest.MonkeyPatch) -> None:
    answer = probe()
    assert isinstance(answer, Supported)
    capabilities = answer.devices[0].capabilities
    assert capabilities.has("bf16_matmul")
    assert not capabilities.has("graph_capture")
    assert answer.devices[1].name == "Intel Data Center GPU Max (0x0bd5, driver xe)"


@pytest.mark.parametrize(
    ("setting", "cards", "torch_says", "reason"),
    [
        (None, [OLD], None, "no GPU here is of a family with matrix engines (device id 0x3e92)"),
        ("7", [ARC], None, "ZE_AFFINITY_MASK='7' leaves no GPU to this process"),
        (None, [ARC], "torch 2.13.0+cpu is built without XPU", "torch 2.13.0+cpu is built without XPU"),
    ],
)
def test_why_not(
    machine: pytest.MonkeyPatch, setting: str | None, cards: list[Card], torch_says: str | None, reason: str
) -> None:
    if setting is not None:
        machine.setenv("ZE_AFFINITY_MASK", setting)
    machine.setattr(probing, "read_cards", lambda: cards)
    machine.setattr(probing, "why_not_built_for", lambda interface, name: torch_says)
    assert probe() == Unsupported("xpu", reason)


def test_no_loader(machine: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise DriverError("the Level Zero loader was not found")

    machine.setattr(probing, "require_loader", refuse)
    assert probe() == Unsupported("xpu", "the Level Zero loader was not found")


def test_probing_and_diagnosing_import_no_torch() -> None:
    script = (
        "import sys; from inferplane_xpu import plugin; plugin.probe_devices(); plugin.diagnose();"
        "plugin.collect_env(); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
