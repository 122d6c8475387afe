"""docs/vendors/faults.md shows what is printed when a plugin goes wrong. Each fault is made here, and prints that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from repository import ROOT

PAGE = ROOT / "docs/vendors/faults.md"
FRAME = re.compile(r'  File "(?P<path>[^"]+)", line \d+, in .+\n(?:    .*\n)*')


@dataclass(frozen=True)
class Fault:
    title: str
    plugins: dict[str, str]
    """Source of each plugin by its name."""
    command: str
    printed: str


def faults() -> list[Fault]:
    found = []
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]:
        sources = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
        console = re.search(r"^```console\n\$ (.*?)\n(.*?)^```$", section, re.M | re.S)
        assert sources and console, section
        names = {re.search(r'PluginManifest\("(\w+)"', source)[1]: source for source in sources}  # type: ignore[index]
        found.append(Fault(section.splitlines()[0], names, console[1], console[2]))
    return found


def install(folder: Path, name: str, source: str) -> None:
    (folder / f"{name}_plugin.py").write_text(source)
    info = folder / f"inferplane_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: inferplane-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[inferplane.plugins]\n{name} = {name}_plugin\n")


def printed_by(command: str, folder: Path) -> str:
    """Standard error, with the frames of a traceback that are not the plugin's left out."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("INFERPLANE_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])
    settings, _, program = command.partition("inferplane ")
    environment |= dict(setting.split("=") for setting in settings.split())
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "inferplane.cli.main", *program.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
    )
    assert time.monotonic() - started < 45, "it took too long"
    printed = FRAME.sub(lambda frame: _shown(frame, folder), done.stderr)
    return re.sub(r"\(/[^)]*/inferplane/", "(…/inferplane/", printed)


def _shown(frame: re.Match[str], folder: Path) -> str:
    return frame[0].replace(f"{folder}/", "…/") if Path(frame["path"]).parent == folder else ""


@pytest.mark.parametrize("fault", faults(), ids=lambda fault: fault.title)
def test_a_fault_prints_what_the_page_says(fault: Fault, tmp_path: Path) -> None:
    for name, source in fault.plugins.items():
        install(tmp_path, name, source)
    assert printed_by(fault.command, tmp_path) == fault.printed


def test_the_faults_that_matter_are_there() -> None:
    text = " ".join(fault.title for fault in faults())
    for words in ("at import", "named", "hangs", "same score", "newer", "not there", "older"):
        assert words in text
