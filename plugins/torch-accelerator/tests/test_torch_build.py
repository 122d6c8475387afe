"""What a torch was built for, told by its files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inferplane_torch_accelerator.torch_build import TorchBuild, read_torch_build, why_not_built_for

HOST = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
ROCM = "__version__ = '2.11.0+rocm7.2'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.2.5'\n"


@pytest.fixture
def torch_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a torch that cannot be imported, with a ``version.py``, the only one that is found."""

    def make(version_py: str | None) -> None:
        package = tmp_path / "torch"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        if version_py is not None:
            (package / "version.py").write_text(version_py)

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return make


def test_it_is_read_and_not_imported(torch_with) -> None:
    torch_with(ROCM)
    assert read_torch_build() == TorchBuild("2.11.0+rocm7.2", {"hip": "7.2.5"})
    assert why_not_built_for("hip", "ROCm") is None
    assert why_not_built_for("xpu", "XPU") is not None


def test_a_build_for_the_host(torch_with) -> None:
    torch_with(HOST)
    reason = "torch 2.13.0+cpu is built without CUDA; install a torch build for CUDA"
    assert why_not_built_for("cuda", "CUDA") == reason


def test_a_build_that_does_not_tell(torch_with) -> None:
    torch_with(None)
    assert read_torch_build() is None
    assert why_not_built_for("cuda", "CUDA") is None


def test_no_torch(torch_with) -> None:
    assert why_not_built_for("cuda", "CUDA") == "torch is not installed"
