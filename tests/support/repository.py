"""The repository as tests see it: its folders, its distributions and the files that belong to it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHARED_BY_PLATFORMS = "plugins/torch-accelerator"


@dataclass(frozen=True)
class Distribution:
    """One folder that is published on its own."""

    folder: Path
    pyproject: dict[str, Any]

    @property
    def relative_folder(self) -> str:
        return self.folder.relative_to(ROOT).as_posix()

    @property
    def name(self) -> str:
        return self.pyproject["project"]["name"]

    @property
    def import_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def package(self) -> Path:
        return self.folder / "src" / self.import_name

    @property
    def kind(self) -> str:
        """core, server, platform, shared (by platforms), plugin, conformance or kernels: for the import rule."""
        if self.relative_folder == SHARED_BY_PLATFORMS:
            return "shared"
        first, *rest = self.relative_folder.split("/")
        if rest and rest[0].startswith("kernels-"):
            return "kernels"
        return {"platforms": "platform", "plugins": "plugin", "tests": "conformance"}.get(
            first, first.split("-")[0]
        )

    @property
    def requirements(self) -> list[str]:
        return self.pyproject["project"]["dependencies"]

    @property
    def required_names(self) -> set[str]:
        return {re.split(r"[^A-Za-z0-9._-]", requirement)[0] for requirement in self.requirements}


@cache
def distributions() -> tuple[Distribution, ...]:
    found = [path for path in repository_files() if path.name == "pyproject.toml" and path.parent != ROOT]
    return tuple(
        Distribution(path.parent, tomllib.loads(path.read_text(encoding="utf-8"))) for path in sorted(found)
    )


@cache
def repository_files() -> tuple[Path, ...]:
    """Files that are tracked, or would be: everything that git does not ignore."""
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-coz", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [ROOT / name for name in listing.split("\0") if name]
    return tuple(sorted(path for path in paths if path.is_file()))


def text_files(*under: str) -> list[Path]:
    """The repository's files below the given folders (all without any) that are text; symbolic links left out."""
    roots = [ROOT / folder for folder in under] or [ROOT]
    return [
        path
        for path in repository_files()
        if not path.is_symlink() and any(path.is_relative_to(root) for root in roots) and _is_text(path)
    ]


def python_files(*under: str) -> list[Path]:
    return [path for path in text_files(*under) if path.suffix == ".py"]


@cache
def source_files() -> tuple[Path, ...]:
    """Python files that are shipped in some distribution."""
    folders = [f"{distribution.relative_folder}/src" for distribution in distributions()]
    return tuple(python_files(*folders))


def native_files() -> list[Path]:
    """What is compiled for a processor: files of any `csrc`."""
    return [path for path in text_files() if "csrc" in path.relative_to(ROOT).parts]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(4096)
