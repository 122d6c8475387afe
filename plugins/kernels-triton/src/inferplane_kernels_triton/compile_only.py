"""A Triton driver for a device that is not there: every launch compiles its kernel, and none runs.

The same entry points are called as on a device, with tensors of torch's meta device, so that what is compiled is what a
launch there would compile: the same constants and the same facts about alignment.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

SHARED_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10, "gfx1100": 64 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory that one program may have. A kernel that wants more is an error, as it is on the device."""


def parse_target(text: str) -> GPUTarget:
    """``hip:gfx942`` or ``cuda:90``. Raises ValueError, naming the known ones, for any other."""
    backend, _, name = text.partition(":")
    arch: str | int = int(name) if name.isdigit() else name
    if backend not in ("hip", "cuda") or arch not in SHARED_BYTES:
        known = [f"{'cuda' if isinstance(known, int) else 'hip'}:{known}" for known in SHARED_BYTES]
        raise ValueError(f"unknown target {text!r}; known are {', '.join(known)}")
    return GPUTarget(backend, arch, 64 if str(arch).startswith("gfx9") else 32)


@dataclass(frozen=True)
class CompiledKernel:
    """What the compiler says of one kernel."""

    name: str
    shared_bytes: int
    registers: int
    """Vector registers of a thread."""
    spills: int
    """Registers (AMD) or bytes (NVIDIA) of a thread that did not fit and live in memory."""


@dataclass
class _Driver:
    """What Triton's runtime asks of a driver, answered for a target without a device."""

    target: GPUTarget
    launched: list[CompiledKernel] = field(default_factory=list)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        """Compiled kernels are cached by device; a name for each target keeps them apart."""
        return f"{self.target.backend}:{self.target.arch}"

    def get_current_stream(self, device: object) -> int:
        return 0

    @property
    def utils(self) -> SimpleNamespace:
        limit = SHARED_BYTES[self.target.arch]
        return SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": limit, "multiprocessor_count": 1},
            load_binary=self._load_binary,
        )

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return lambda *arguments: None

    def _load_binary(self, name: str, binary: bytes | str, shared: int, device: object) -> tuple[Any, ...]:
        read = _amd_resources if self.target.backend == "hip" else _nvidia_resources
        registers, spills = read(binary)
        self.launched.append(CompiledKernel(name, shared, registers, spills))
        return None, None, registers, spills, 1024


def _nvidia_resources(cubin: bytes | str) -> tuple[int, int]:
    assert isinstance(cubin, bytes)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _amd_resources(hsaco: bytes | str) -> tuple[int, int]:
    """From the metadata in msgpack at the end of the code object: a key, then a small or a typed integer."""
    assert isinstance(hsaco, bytes)
    found = []
    for key in (b".vgpr_count", b".vgpr_spill_count"):
        at = hsaco.find(key) + len(key)
        width = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(hsaco[at], 0)
        found.append(int.from_bytes(hsaco[at + 1 : at + 1 + width], "big") if width else hsaco[at])
    return found[0], found[1]


@contextmanager
def compile_only(target: GPUTarget) -> Iterator[list[CompiledKernel]]:
    """Within it kernels are compiled for ``target`` and not run; yields the list of what was compiled so far."""
    driver = _Driver(target)
    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    try:
        yield driver.launched
    finally:
        triton.runtime.driver._active = previous
