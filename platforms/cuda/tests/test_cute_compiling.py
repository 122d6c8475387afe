"""Kernels of the CuTe DSL: compiled by a process the first time, and by the worker's thread if that does not work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from inferplane_cuda import cute_compiling, cute_process, flash_library
from inferplane_cuda.flash_library import Variant

HOST = torch.device("cpu")
ANSWERS = """
import json, sys
for line in sys.stdin:
    task = json.loads(line)
    print(task["library says"], flush=True)
"""
ENDS = "import sys; sys.stdin.readline()"


@pytest.fixture(autouse=True)
def first_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cute_compiling, "_compiling", {})
    monkeypatch.setattr(cute_compiling, "LEAST_PROCESSORS", 1)
    monkeypatch.setattr(cute_process, "COMMAND", (sys.executable, "-c", ANSWERS))


def start(kernel: str, says: str, launched: list[str]) -> None:
    def launch() -> None:
        launched.append(kernel)

    cute_compiling.start_compiling(kernel, launch, HOST, "acme", {"library says": says, "kernel": kernel})


def notes(folder: Path) -> int:
    return len(list((folder / "inferplane" / "compiled").iterdir()))


def test_a_process_compiles_what_was_never_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched: list[str] = []
    start("a", "compiled", launched)
    start("b", "compiled", launched)
    start("a", "compiled", launched)
    cute_compiling.wait()
    assert launched == ["a", "b"] and notes(tmp_path) == 2
    assert not cute_compiling._processes
    monkeypatch.setattr(cute_compiling, "_compiling", {})  # as at the next start
    monkeypatch.setattr(cute_compiling, "CompilingProcess", None)
    start("a", "compiled", launched)
    cute_compiling.wait()
    assert launched == ["a", "b", "a"]


@pytest.mark.parametrize("script", [ANSWERS, ENDS], ids=["says no", "ends"])
def test_what_it_cannot_compile_is_compiled_here(
    script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cute_process, "COMMAND", (sys.executable, "-c", script))
    launched: list[str] = []
    start("a", "RuntimeError: out of memory", launched)
    start("b", "RuntimeError: out of memory", launched)
    cute_compiling.wait()
    assert launched == ["a", "b"] and notes(tmp_path) == 0


def test_a_process_that_says_nothing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cute_process, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(cute_process, "TIMEOUT_S", 0.1)
    launched: list[str] = []
    start("a", "compiled", launched)
    cute_compiling.wait()
    assert launched == ["a"] and notes(tmp_path) == 0


def test_a_variant_survives_as_json() -> None:
    variant = Variant(32, 8, 128, 16, torch.bfloat16, 30.0, has_window=True, has_sinks=False)
    assert Variant.of_task(variant.task()) == variant
    assert "bfloat16" in str(variant.task())


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["flash", "quack"])
def test_a_real_process(library: str, monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    monkeypatch.setattr(cute_process, "COMMAND", (sys.executable, "-m", "inferplane_cuda.cute_process"))
    if (missing := flash_library.missing_package()) is not None:
        pytest.skip(f"{missing} is not installed")
    tasks = {
        "flash": Variant(4, 2, 64, 16, torch.bfloat16, None, has_window=False, has_sinks=False).task(),
        "quack": {
            "dtype": "bfloat16",
            "tiles": {"tile_m": 128, "tile_n": 192, "pingpong": 1, "cluster_m": 2, "cluster_n": 1},
            "is_gated": True,
        },
    }
    process = cute_process.CompilingProcess(library, gpu)
    try:
        assert process.compile(tasks[library])
        assert not process.compile({"is_gated": True})
    finally:
        process.close()
