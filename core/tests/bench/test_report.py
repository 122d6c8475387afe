"""A figure names the commit of its code, or none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from inferplane.bench.report import commit_of


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one commit that tracks ``code.py`` and ignores ``packages``."""
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("packages\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=T", "-c", "user.email=t@example.org", "commit", "-q", "-m", "first")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_of_an_unchanged_checkout(checkout: Path) -> None:
    assert commit_of(checkout / "code.py") == git(checkout, "rev-parse", "--short", "HEAD")


def test_no_commit_of_a_tree_that_was_copied_over_another_one(checkout: Path) -> None:
    (checkout / "code.py").write_text("x = 2\n")
    assert commit_of(checkout / "code.py") == "unknown"


def test_no_commit_of_a_package_installed_below_somebody_elses_repository(checkout: Path) -> None:
    package = checkout / "packages"
    package.mkdir()
    (package / "report.py").write_text("")
    assert commit_of(package / "report.py") == "unknown"


def test_no_commit_outside_of_repositories(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("")
    assert commit_of(tmp_path / "code.py") == "unknown"
