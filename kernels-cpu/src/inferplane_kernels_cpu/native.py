"""The library of native kernels: where it is, which instructions it uses, and its threads. Imports no torch.

It is called through ctypes: about a microsecond a call, and other Python threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import inferplane_kernels_cpu

LEVELS = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
"""Sets of instructions by rising ability; each has all of the ones before it. Every kernel exists for each."""

LEVEL_VARIABLE = "INFERPLANE_CPU_ISA"
"""Environment variable: a level below this machine's to use, or ``none`` to do without native kernels."""

Kernel = Callable[..., Any]

pointer = ctypes.c_void_p
"""Of a parameter: ``tensor.data_ptr()``, or None."""
int64 = ctypes.c_int64
int32 = ctypes.c_int32
float32 = ctypes.c_float
boolean = ctypes.c_bool


@cache
def unavailable_reason() -> str | None:
    """Why no native kernel can run here; None if they can. Raises `ValueError` for a bad ``INFERPLANE_CPU_ISA``."""
    if os.environ.get(LEVEL_VARIABLE) == "none":
        return f"{LEVEL_VARIABLE} is none"
    if _path() is None:
        return f"inferplane-kernels-cpu was installed without its native library: {_why_missing()}"
    try:
        library = _library()
    except OSError as error:
        return f"the native library does not load: {error}"
    if library.inferplane_highest_level() == 0:
        return "the processor has no AVX2"
    level()
    return None


def mend() -> str | None:
    """What to do where `unavailable_reason` says that there is none; None where nothing helps."""
    if os.environ.get(LEVEL_VARIABLE) == "none":
        return f"unset {LEVEL_VARIABLE}"
    if _path() is not None:
        return None
    return "install a C++ compiler that works (g++ or clang++), and inferplane-kernels-cpu anew with `pip install -v`"


@cache
def levels() -> tuple[str, ...]:
    """What this machine can run. Empty where `unavailable_reason` says why."""
    if _path() is None or unavailable_reason() is not None:
        return ()
    return LEVELS[: _library().inferplane_highest_level()]


@cache
def level() -> str:
    """The level in use: this machine's highest, or ``INFERPLANE_CPU_ISA``. Only where kernels are available."""
    possible = LEVELS[: _library().inferplane_highest_level()]
    asked = os.environ.get(LEVEL_VARIABLE) or possible[-1]
    if asked not in possible:
        raise ValueError(
            f"{LEVEL_VARIABLE} is {asked!r}; this machine can run {', '.join(possible)}, or none"
        )
    return asked


def kernel(name: str, *parameters: Any, at: str | None = None, returns: Any = None) -> Kernel:
    """The exported function ``name``, compiled for the level in use or for ``at``. Look it up once and keep it.

    One that the library calls recordable enters the `Program` that is being recorded; others raise RuntimeError then.
    """
    place = at or level()
    try:
        entry = pointer.in_dll(_library(), f"{name}_entry_{place}").value
    except ValueError:
        return _refused_in_programs(name, function(f"{name}_{place}", *parameters, returns=returns))
    assert entry is not None
    return ctypes.CFUNCTYPE(returns, *parameters)(entry)


def function(name: str, *parameters: Any, returns: Any = None) -> Kernel:
    """The exported function of just that name."""
    found = _library()[name]  # a new object each time, so that the types are its own
    found.argtypes, found.restype = parameters, returns
    return found


def _refused_in_programs(name: str, call: Kernel) -> Kernel:
    is_recording = function("inferplane_is_recording", returns=ctypes.c_bool)

    def checked(*arguments: Any) -> Any:
        if is_recording():
            raise RuntimeError(f"{name} is no part of a step that can be recorded")
        return call(*arguments)

    return checked


def set_num_threads(number: int) -> None:
    """Threads of the regions to come, the caller included. With 1 everything runs in the caller."""
    _library().inferplane_set_num_threads(number)


def num_threads() -> int:
    """As set; else as many as there are cores that this process may use."""
    return int(_library().inferplane_num_threads())


@cache
def _path() -> Path | None:
    return _installed("_native.so")


def _why_missing() -> str:
    """As build_native.cmake left it: a reason, and the compiler's first error if it is known."""
    if (path := _installed("_native_missing.txt")) is None:
        return "CMake did not run when it was installed"
    return ": ".join(path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[:2])


def _installed(name: str) -> Path | None:
    # an editable install has built files in another folder than the sources; the package knows of both
    folders = (Path(folder) for folder in inferplane_kernels_cpu.__path__)
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


@cache
def _library() -> ctypes.CDLL:
    path = _path()
    assert path is not None
    return ctypes.CDLL(str(path))
