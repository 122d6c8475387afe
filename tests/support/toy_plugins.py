"""Toy distributions: a module and its dist-info folder in a directory, as if a wheel had been unpacked there."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

PLATFORM = """
from inferplane.api import *

MANIFEST = PluginManifest(name={name!r}, api={api}, provides=("platform",))

class ToyPlatform(Platform):
    name = {name!r}
    def config_defaults(self, args, device, checkpoint_dtype): return {{}}
    def device_runtime(self, device): raise NotImplementedError
    def worker_class(self): raise NotImplementedError
    def communicator(self, group, runtime): raise NotImplementedError

@hookimpl
def probe_devices():
    return Supported({name!r}, {score}, tuple(DeviceDescriptor({name!r}, i, "toy card", 1 << 30) for i in range(2)))

@hookimpl
def create_platform(device):
    return ToyPlatform() if device.platform == {name!r} else None
"""


class ToyIndex:
    """Installs toys into one directory on the import path; pytest's monkeypatch takes them away again."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(str(directory))

    def install(
        self, name: str, source: str, *, version: str = "1.2.3", distribution: str | None = None
    ) -> str:
        """Returns the distribution's name."""
        distribution = distribution or f"toy-{name}"
        module = f"{distribution.replace('-', '_')}_module"
        (self._directory / f"{module}.py").write_text(textwrap.dedent(source))
        info = self._directory / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[inferplane.plugins]\n{name} = {module}\n")
        self._monkeypatch.delitem(sys.modules, module, raising=False)
        return distribution

    def install_platform(self, name: str, score: int = 100, api: str = "(2, 0)") -> str:
        return self.install(name, PLATFORM.format(name=name, score=score, api=api))
