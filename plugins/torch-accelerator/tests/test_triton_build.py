"""What a triton compiles for, told by its files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inferplane_torch_accelerator.triton_build import why_no_triton


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where packages are found."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    return tmp_path


def test_none(folder: Path) -> None:
    assert why_no_triton("amd") == "triton is not installed"


def test_one_for_other_devices(folder: Path) -> None:
    for backend in ("nvidia", "amd"):
        (folder / "triton/backends" / backend).mkdir(parents=True)
        (folder / "triton/backends" / backend / "compiler.py").touch()
    (folder / "triton/__init__.py").write_text("raise RuntimeError('imported')")
    assert why_no_triton("amd") is None
    assert why_no_triton("intel") == "the installed triton compiles for amd, nvidia, not for intel"
