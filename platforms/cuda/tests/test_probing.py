"""What the platform says of machines with and without GPUs, with a driver made for the purpose."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inferplane.api import Supported, Unsupported
from inferplane_cuda import probing
from inferplane_cuda.nvml import DriverError, Gpu, driver_version, read_gpus
from inferplane_cuda.probing import probe

GPUS = [
    Gpu("GPU-aa11", "Old", 4 << 30, (6, 1)),
    Gpu("GPU-ab22", "Ampere", 80 << 30, (8, 0)),
    Gpu("GPU-cc33", "Hopper", 141 << 30, (9, 0)),
]


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> tuple[str]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    library = tmp_path_factory.mktemp("driver") / "libfake.so"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return (str(library),)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Three GPUs, all visible, and a torch that can use them."""
    monkeypatch.setattr(probing, "read_gpus", lambda: GPUS)
    monkeypatch.setattr(probing, "why_not_built_for", lambda interface, name: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_the_driver_is_read(fake_driver: tuple[str]) -> None:
    assert read_gpus(fake_driver) == [
        Gpu("GPU-1aa", "GPU 1", 1 << 34, (9, 0)),
        Gpu("GPU-2aa", "GPU 2", 2 << 34, (9, 0)),
    ]
    assert driver_version(fake_driver) == "580.1"


def test_a_driver_that_fails_says_why(fake_driver: tuple[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_STATUS", "18")
    with pytest.raises(DriverError, match=r"Driver/library version mismatch \(status 18\)"):
        read_gpus(fake_driver)


def test_no_driver() -> None:
    with pytest.raises(
        DriverError, match=r"no NVIDIA driver on this machine \(libabsent\.so was not found\)"
    ):
        read_gpus(("libabsent.so",))


def test_devices_keep_the_numbers_that_torch_gives_them(machine: pytest.MonkeyPatch) -> None:
    found = probe()
    assert isinstance(found, Supported)
    assert [(device.index, device.name) for device in found.devices] == [(1, "Ampere"), (2, "Hopper")]
    ampere, hopper = (device.capabilities for device in found.devices)
    assert ampere.has("bf16_matmul") and not ampere.has("fp8_e4m3_matmul")
    assert hopper.has("fp8_e4m3_matmul") and hopper.has("graph_capture")


@pytest.mark.parametrize(
    ("setting", "gpus", "torch_says", "reason"),
    [
        ("0", GPUS, None, "Old has compute capability 6.1; at least 7.5 is needed"),
        ("", GPUS, None, "CUDA_VISIBLE_DEVICES='' leaves no GPU to this process"),
        (None, [], None, "the NVIDIA driver is there, but it finds no GPU"),
        (None, GPUS, "torch 2.13.0+cpu is built without CUDA", "torch 2.13.0+cpu is built without CUDA"),
    ],
)
def test_why_not(
    machine: pytest.MonkeyPatch, setting: str | None, gpus: list[Gpu], torch_says: str | None, reason: str
) -> None:
    if setting is not None:
        machine.setenv("CUDA_VISIBLE_DEVICES", setting)
    machine.setattr(probing, "read_gpus", lambda: gpus)
    machine.setattr(probing, "why_not_built_for", lambda interface, name: torch_says)
    assert probe() == Unsupported("cuda", reason)


def test_probing_imports_no_torch() -> None:
    script = (
        "import sys; from inferplane.plugins import load_plugins; p = load_plugins(); p.probe();"
        "p.collect_env(); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
