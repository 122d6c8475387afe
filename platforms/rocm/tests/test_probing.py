"""What the platform says of machines with and without GPUs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inferplane.api import Supported, Unsupported
from inferplane_rocm import probing
from inferplane_rocm.probing import ARCHITECTURES, probe
from inferplane_rocm.topology import DriverError, Gpu

GIB = 1 << 30
GPUS = [
    Gpu("", "gfx1036", 2, 32, GIB),
    Gpu("GPU-00000000000000a1", "gfx942", 304, 64, 192 * GIB),
    Gpu("GPU-00000000000000b2", "gfx950", 256, 64, 288 * GIB),
    Gpu("", "gfx1100", 96, 32, 24 * GIB),
]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four GPUs, the first of them a processor's, and a torch that can use them."""
    monkeypatch.setattr(probing, "read_gpus", lambda: GPUS)
    monkeypatch.setattr(probing, "why_not_built_for", lambda interface, name: None)
    for name in (probing.VISIBLE_TO_DRIVER, *probing.VISIBLE_TO_RUNTIME):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def found() -> list[tuple[int, str]]:
    answer = probe()
    assert isinstance(answer, Supported)
    return [(device.index, device.name.split("(")[1].split(",")[0]) for device in answer.devices]


def test_devices_keep_the_numbers_that_torch_gives_them(machine: pytest.MonkeyPatch) -> None:
    assert found() == [(1, "gfx942"), (2, "gfx950"), (3, "gfx1100")]


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,1"}, [(0, "gfx950"), (1, "gfx942")]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [(0, "gfx1100")]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "3"}, [(0, "gfx942")]),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, [(0, "gfx950"), (1, "gfx1100")]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000b2,1"}, [(0, "gfx950"), (1, "gfx942")]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, [(0, "gfx950")]),
    ],
)
def test_the_visible_ones(
    machine: pytest.MonkeyPatch, settings: dict[str, str], left: list[tuple[int, str]]
) -> None:
    for name, value in settings.items():
        machine.setenv(name, value)
    assert found() == left


def test_eight_bit_floats_have_the_names_of_their_formats(machine: pytest.MonkeyPatch) -> None:
    answer = probe()
    assert isinstance(answer, Supported)
    mi300, mi350, radeon = (device.capabilities for device in answer.devices)
    assert mi300.has("fp8_e4m3fnuz_matmul") and not mi300.has("fp8_e4m3_matmul")
    assert mi350.has("fp8_e4m3_matmul") and not mi350.has("fp8_e4m3fnuz_matmul")
    assert mi300.has("wave64") and not radeon.has("wave64")
    assert all(each.has("bf16_matmul") and each.has("graph_capture") for each in (mi300, mi350, radeon))


def test_the_architectures_that_kernels_are_compiled_for_are_served() -> None:
    from inferplane_kernels_rocm import ARCHITECTURES as COMPILED

    assert set(COMPILED) <= ARCHITECTURES.keys()


@pytest.mark.parametrize(
    ("settings", "gpus", "torch_says", "reason"),
    [
        ({}, [], None, "the AMD GPU driver is there, but it shows this process no GPU"),
        ({"HIP_VISIBLE_DEVICES": "-1"}, GPUS, None, "HIP_VISIBLE_DEVICES='-1' leaves no GPU to this process"),
        (
            {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"},
            GPUS,
            None,
            "ROCR_VISIBLE_DEVICES='0' and HIP_VISIBLE_DEVICES='1' leave no GPU to this process",
        ),
        ({}, GPUS, "torch 2.13.0+cpu is built without ROCm", "torch 2.13.0+cpu is built without ROCm"),
        ({}, GPUS[:1], None, f"the GPU is a gfx1036; one of {', '.join(ARCHITECTURES)} is needed"),
    ],
)
def test_why_not(
    machine: pytest.MonkeyPatch,
    settings: dict[str, str],
    gpus: list[Gpu],
    torch_says: str | None,
    reason: str,
) -> None:
    for name, value in settings.items():
        machine.setenv(name, value)
    machine.setattr(probing, "read_gpus", lambda: gpus)
    machine.setattr(probing, "why_not_built_for", lambda interface, name: torch_says)
    assert probe() == Unsupported("rocm", reason)


def test_a_driver_that_lets_nobody_in(machine: pytest.MonkeyPatch) -> None:
    def refuse() -> list[Gpu]:
        raise DriverError("no permission on /dev/kfd")

    machine.setattr(probing, "read_gpus", refuse)
    assert probe() == Unsupported("rocm", "no permission on /dev/kfd")


def test_probing_and_diagnosing_import_no_torch() -> None:
    script = (
        "import sys; from inferplane_rocm import plugin; plugin.probe_devices(); plugin.diagnose();"
        "plugin.collect_env(); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
