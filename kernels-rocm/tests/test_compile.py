"""Every Triton kernel compiles for AMD GPUs with the configurations shipped for them, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferplane_kernels_rocm import ARCHITECTURES, tuning_file


def compile_kernels(tmp_path: Path, *arguments: str) -> str:
    """Runs the command in a process of its own: in this one Triton may be set to interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # a cached kernel would not be compiled
    done = subprocess.run(
        [sys.executable, "-m", "inferplane_kernels_triton.compile", *arguments],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_kernel_of_each_kind_compiles(architecture: str, tmp_path: Path):
    cases = ("elementwise", "rotary", "store_kv", "matvec")
    arguments = [f"--case={case}" for case in cases]
    output = compile_kernels(
        tmp_path, f"hip:{architecture}", f"--tuning={tuning_file(architecture)}", *arguments
    )
    assert all(f"hip:{architecture} {case} compiled in" in output for case in cases)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(architecture: str, tmp_path: Path):
    output = compile_kernels(tmp_path, f"hip:{architecture}", f"--tuning={tuning_file(architecture)}")
    assert output.count("compiled in") >= 8


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_kernel_compiles_for_nvidia(tmp_path: Path):
    assert compile_kernels(tmp_path, "cuda:90").count("compiled in") >= 10


def test_an_architecture_without_a_table():
    assert tuning_file("gfx803") is None
    assert all(tuning_file(architecture) for architecture in ARCHITECTURES)
