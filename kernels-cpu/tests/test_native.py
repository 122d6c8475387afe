"""The native library: levels of instructions, threads, and life with other threads and processes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native_linear import NativeLinear

needs_native = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=str(native.unavailable_reason())
)


@pytest.mark.skipif(
    not (shutil.which("c++") and platform.machine() == "x86_64" and sys.platform == "linux"),
    reason="nothing to compile with, or for",
)
def test_where_there_is_a_compiler_the_library_was_built() -> None:
    """An install goes on without it, so that a mistake in a source shows here only."""
    assert native._path() is not None, native.unavailable_reason()


BUILD_SCRIPT = Path(__file__).parents[1] / "build_native.cmake"
SMALL_PROJECT = """
cmake_minimum_required(VERSION 3.20)
project(small LANGUAGES CXX)
add_library(_native SHARED small.cpp)
set_target_properties(_native PROPERTIES PREFIX "" SUFFIX ".so")
install(TARGETS _native LIBRARY DESTINATION .)
"""


@pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("ninja") and shutil.which("c++")),
    reason="no tools to build with",
)
@pytest.mark.parametrize(
    ("source", "environment", "reasons"),
    [
        ("int answer() { return 42; }", {}, []),
        (
            "int answer() { return missing[0]; }",
            {},
            ["the C\\+\\+ compiler failed", r"small\.cpp:1:\d+: error: .*missing.* was not declared"],
        ),
        ("", {"CXX": "/bin/false"}, ["the C\\+\\+ compiler or CMake failed"]),
        ("", {"PATH": "/nowhere", "CXX": ""}, ["no C\\+\\+ compiler was found"]),
    ],
    ids=["works", "mistake in a source", "compiler does not work", "no compiler"],
)
def test_a_build_never_fails_and_leaves_the_library_or_the_reason(
    source: str,
    environment: dict[str, str],
    reasons: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "CMakeLists.txt").write_text(SMALL_PROJECT)
    (tmp_path / "small.cpp").write_text(source)
    package = tmp_path / "package"
    settings = {
        "SOURCE": tmp_path,
        "BUILD": tmp_path / "build",
        "PACKAGE": package,
        "GENERATOR": "Ninja",
        "MAKE_PROGRAM": shutil.which("ninja"),
    }
    done = subprocess.run(
        [
            shutil.which("cmake"),
            *(f"-D{name}={value}" for name, value in settings.items()),
            "-P",
            BUILD_SCRIPT,
        ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (package / "_native.so").is_file() is (not reasons)
    assert ("WITHOUT its native library" in done.stderr) is bool(reasons)
    monkeypatch.setattr(
        native, "_installed", lambda name: found if (found := package / name).is_file() else None
    )
    if reasons:
        assert re.fullmatch(": ".join(f".*{reason}.*" for reason in reasons), native._why_missing())


def product(x: torch.Tensor, weight: torch.Tensor, level: str | None = None) -> torch.Tensor:
    return NativeLinear(weight, None, level)(x)


@pytest.fixture
def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = torch.randn(2, 77).bfloat16(), torch.randn(1000, 77).bfloat16()
    return x, weight, (x.double() @ weight.double().T)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.double() - want).abs().max() <= 1e-2 * want.abs().max()


@needs_native
@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_level_on_any_number_of_threads(case, level: str, num_threads: int) -> None:
    if level not in native.levels():
        pytest.skip("not on this machine")
    before = native.num_threads()
    native.set_num_threads(num_threads)
    try:
        assert native.num_threads() == num_threads
        for _ in range(50):
            check(product(case[0], case[1], level), case[2])
    finally:
        native.set_num_threads(before)


@needs_native
def test_callers_in_several_threads(case) -> None:
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(100):
            if not torch.allclose(product(case[0], case[1]).double(), case[2], rtol=0.1, atol=0.3):
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


IN_A_CHILD = """
import os, torch
from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native_linear import NativeLinear
native.set_num_threads(3)
multiply = NativeLinear(torch.ones(1000, 64).bfloat16(), None)
def call():
    assert (multiply(torch.ones(1, 64).bfloat16()) == 64).all()
call()
child = os.fork()
call()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("done")
"""


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_native
def test_fork_and_the_end_of_the_process() -> None:
    done = run(IN_A_CHILD)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


LEVEL = "from inferplane_kernels_cpu import native; print(native.unavailable_reason() or native.level())"


@needs_native
def test_the_level_can_be_forced() -> None:
    assert run(LEVEL, INFERPLANE_CPU_ISA="avx2").stdout == "avx2\n"
    assert run(LEVEL, INFERPLANE_CPU_ISA="").stdout == f"{native.levels()[-1]}\n"
    assert run(LEVEL, INFERPLANE_CPU_ISA="none").stdout == "INFERPLANE_CPU_ISA is none\n"
    assert (
        "INFERPLANE_CPU_ISA is 'sse'; this machine can run avx2"
        in run(LEVEL, INFERPLANE_CPU_ISA="sse").stderr
    )


def test_a_wheel_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_path", lambda: None)
    native.unavailable_reason.cache_clear()
    assert "without its native library" in str(native.unavailable_reason())
    native.unavailable_reason.cache_clear()
