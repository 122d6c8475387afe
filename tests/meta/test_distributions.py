"""Every distribution's pyproject.toml says what its folder says."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from repository import ROOT, Distribution, distributions, python_files, repository_files, shown

MAY_NEED = {
    "core": set(),
    "kernels": set(),
    "shared": {"core", "kernels"},
    "platform": {"core", "kernels", "shared"},
    "plugin": {"core"},
    "server": {"core"},
    "conformance": {"core"},
}

every_distribution = pytest.mark.parametrize("distribution", distributions(), ids=lambda d: d.name)


def test_the_distributions_are_found():
    assert {
        "inferplane",
        "inferplane-cpu",
        "inferplane-cuda",
        "inferplane-kernels-cpu",
        "inferplane-kernels-cuda",
        "inferplane-kernels-rocm",
        "inferplane-kernels-triton",
        "inferplane-rocm",
        "inferplane-server",
        "inferplane-torch-accelerator",
        "inferplane-xpu",
    } <= {d.name for d in distributions()}


@every_distribution
def test_name_follows_from_folder(distribution: Distribution):
    folder = distribution.relative_folder
    expected = "inferplane" if folder == "core" else "inferplane-" + folder.split("/")[-1]
    assert distribution.name == expected


@every_distribution
def test_folder_has_the_shape_of_a_distribution(distribution: Distribution):
    for name in ("README.md", "LICENSE", f"src/{distribution.import_name}/__init__.py", "tests"):
        assert (distribution.folder / name).exists(), f"{distribution.relative_folder} lacks {name}"
    assert (distribution.package / "py.typed").exists()
    assert (distribution.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert [path.name for path in (distribution.folder / "src").iterdir() if path.is_dir()] == [
        distribution.import_name
    ]


@every_distribution
def test_metadata_is_the_common_one(distribution: Distribution):
    core = next(d for d in distributions() if d.kind == "core").pyproject["project"]
    project = distribution.pyproject["project"]
    for field in ("version", "license", "license-files", "requires-python", "readme"):
        assert project[field] == core[field], f"{field} of {distribution.name} differs from the core's"


@every_distribution
def test_it_needs_only_what_the_import_rule_allows(distribution: Distribution):
    kind_of = {d.name: d.kind for d in distributions()}
    ours = {name for name in distribution.required_names if name.startswith("inferplane")}
    assert ours <= kind_of.keys(), "a distribution that does not exist is required"
    assert {kind_of[name] for name in ours} <= MAY_NEED[distribution.kind]


@every_distribution
def test_tests_mirror_sources(distribution: Distribution):
    tests = distribution.folder / "tests"
    for path in python_files(f"{distribution.relative_folder}/tests"):
        mirrored = distribution.package / path.parent.relative_to(tests)
        assert mirrored.is_dir(), f"{shown(path)} tests {shown(mirrored)}, which does not exist"


@every_distribution
def test_entry_points_name_modules_that_exist(distribution: Distribution):
    project = distribution.pyproject["project"]
    plugins = project.get("entry-points", {}).get("inferplane.plugins", {})
    if distribution.kind in ("platform", "plugin", "server", "conformance"):
        assert plugins, f"{distribution.name} is a plugin, but declares none"
    for target in [*plugins.values(), *project.get("scripts", {}).values()]:
        module = target.split(":")[0].replace(".", "/")
        assert (distribution.folder / "src" / f"{module}.py").is_file(), f"{target} does not exist"


def test_extras_of_the_core_name_what_exists():
    core = next(d for d in distributions() if d.kind == "core")
    ours = {d.name for d in distributions() if d.kind in ("platform", "server")}
    plugins = {d.name for d in distributions() if d.kind == "plugin"}
    extras = core.pyproject["project"]["optional-dependencies"]
    named = {name for extra, names in extras.items() if extra != "all" for name in names}
    assert set(extras["all"]) == named
    assert ours <= named <= ours | plugins  # a plugin may be anybody's, and need not be known here


def test_tox_lists_the_light_dependencies_of_all_distributions():
    """lint, docs and type run without torch and transformers, on a list that has to be written down a second time."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    listed = set(tox["dependencies"]["light"].split())
    needed = {requirement for d in distributions() for requirement in d.requirements}
    heavy_or_ours = {name for name in needed if name.startswith(("inferplane", "torch", "transformers"))}
    assert listed == needed - heavy_or_ours


@every_distribution
def test_the_wheel_holds_the_whole_package(distribution: Distribution, tmp_path: Path):
    backend = distribution.pyproject["build-system"]["build-backend"]
    command = [sys.executable, "-c", f"import {backend} as backend; backend.build_wheel({str(tmp_path)!r})"]
    nothing_compiled = os.environ | {"SKBUILD_WHEEL_CMAKE": "false"}
    subprocess.run(
        command, cwd=distribution.folder, check=True, capture_output=True, timeout=120, env=nothing_compiled
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = distribution.folder / "src"
    assert packed == {
        path.relative_to(source).as_posix() for path in repository_files() if path.is_relative_to(source)
    }
