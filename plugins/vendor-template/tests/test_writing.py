"""The template under another name: complete, importable, and without a trace of the placeholder."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from click.testing import CliRunner

from inferplane_vendor_template.cli import new_platform
from inferplane_vendor_template.writing import TemplateError, write_platform


def test_every_file_is_written_under_the_new_name(tmp_path: Path):
    files = write_platform("north_wind", tmp_path / "new")
    names = {file.as_posix() for file in files}
    assert {
        "pyproject.toml",
        "README.md",
        ".github/workflows/ci.yml",
        "src/inferplane_north_wind/plugin.py",
        "src/inferplane_north_wind/py.typed",
        "tests/test_conformance.py",
    } <= names
    for file in files:
        text = (tmp_path / "new" / file).read_text()
        assert "acme" not in text.lower()
        if file.suffix == ".py":
            ast.parse(text)
    assert "class NorthWindPlatform" in (tmp_path / "new/src/inferplane_north_wind/platform.py").read_text()


@pytest.mark.parametrize("name", ["", "Acme", "a-b", "1st", "a b", "../up"])
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str):
    with pytest.raises(TemplateError, match=r"cannot be called .* use small letters"):
        write_platform(name, tmp_path / "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "owner"), [("reference", "InferPlane"), ("auto", "InferPlane"), ("import", "Python")]
)
def test_a_name_that_is_taken_is_refused(tmp_path: Path, name: str, owner: str):
    with pytest.raises(TemplateError, match=f"the name is {owner}'s own"):
        write_platform(name, tmp_path / "new")


def test_the_name_of_an_installed_plugin_is_refused(tmp_path: Path):
    """Its distribution would be replaced by the new one, which has the same name."""
    result = CliRunner().invoke(new_platform, ["vendor-template", "--into", str(tmp_path / "new")])
    assert result.exit_code == 1
    assert "of inferplane-vendor-template" in result.output and "take another" in result.output
    assert not (tmp_path / "new").exists()


def test_nothing_is_overwritten(tmp_path: Path):
    result = CliRunner().invoke(new_platform, ["north", "--into", str(tmp_path)])
    assert result.exit_code == 1
    assert "exists already" in result.output


def test_the_command_says_what_to_do_next(tmp_path: Path):
    folder = tmp_path / "here"
    result = CliRunner().invoke(new_platform, ["north", "--into", str(folder)])
    assert result.exit_code == 0
    assert f"pip install -e {folder}" in result.output
    assert (folder / "src/inferplane_north/plugin.py").is_file()
