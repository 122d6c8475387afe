"""Who may import whom, beyond what the import-linter contracts in pyproject.toml say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from repository import distributions, python_files, shown

# Host code and front ends: they start fast and run beside the engine, so neither library may ever load in them.
TORCH_FREE_MODULES = [
    "inferplane",
    "inferplane.api",
    "inferplane.cli.main",
    "inferplane.engine.async_engine",
    "inferplane.engine.client",
    "inferplane.engine.detokenizer",
    "inferplane.engine.output",
    "inferplane.plan",
    "inferplane.plugins",
    "inferplane.request",
    "inferplane_conformance.plugin",
    "inferplane_cpu.plugin",
    "inferplane_cuda.plugin",
    "inferplane_kestrel.plugin",
    "inferplane_rocm.plugin",
    "inferplane_server.plugin",
    "inferplane_torch_accelerator.platform",
    "inferplane_torch_accelerator.torch_build",
    "inferplane_torch_accelerator.triton_build",
    "inferplane_torch_accelerator.visible_devices",
    "inferplane_xpu.plugin",
]
TORCH_FREE_PACKAGES = [
    "inferplane.config",
    "inferplane.kvcache",
    "inferplane.scheduler",
    "inferplane.tokenizer",
    "inferplane_server",
]

# Imports the named modules, and with a "*" whatever is below, with torch and transformers made impossible to import.
IMPORT_WITHOUT_TORCH = """
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} was imported")
sys.meta_path.insert(0, Refuse())
name = sys.argv[1].rstrip("*")
module = importlib.import_module(name)
for below in pkgutil.walk_packages(module.__path__, name + ".") if "*" in sys.argv[1] else ():
    importlib.import_module(below.name)
"""


@pytest.mark.parametrize("module", [*TORCH_FREE_MODULES, *(f"{name}*" for name in TORCH_FREE_PACKAGES)])
def test_loads_without_torch_and_transformers(module: str):
    command = [sys.executable, "-c", IMPORT_WITHOUT_TORCH, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def imported_modules(path: Path) -> list[str]:
    """Absolute names of all modules that a file imports, wherever in the file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_platforms_and_plugins_import_the_api_and_nothing_else_of_the_core():
    outside = [d for d in distributions() if d.kind in ("platform", "shared", "plugin")]
    assert outside
    found = [
        f"{shown(path)}: {name}"
        for distribution in outside
        for path in python_files(f"{distribution.relative_folder}/src")
        for name in imported_modules(path)
        if name.split(".")[0] == "inferplane" and name.split(".")[:2] != ["inferplane", "api"]
    ]
    assert not found, "a plugin is written against inferplane.api alone:\n" + "\n".join(found)


def test_plugins_of_this_repository_declare_the_current_api():
    """The adapter for the major before is for those that cannot be changed here."""
    from inferplane.api import API_VERSION
    from inferplane.plugins.negotiation import declared_in_source

    entry_points = {
        target: distribution.name
        for distribution in distributions()
        for target in distribution.pyproject["project"]
        .get("entry-points", {})
        .get("inferplane.plugins", {})
        .values()
    }
    assert entry_points
    declared = {name: declared_in_source(target) for target, name in entry_points.items()}
    assert all(api and api[0] == API_VERSION[0] for api in declared.values()), declared


def test_kernels_import_nothing_of_ours():
    found = [
        f"{shown(path)}: {name}"
        for distribution in distributions()
        if distribution.kind == "kernels"
        for path in python_files(f"{distribution.relative_folder}/src")
        for name in imported_modules(path)
        if name.startswith("inferplane") and name.split(".")[0] != distribution.import_name
    ]
    assert not found


def test_only_the_test_folders_import_test_tools():
    found = [
        f"{shown(path)}: {name}"
        for distribution in distributions()
        if distribution.kind != "conformance"  # it is a test tool
        for path in python_files(f"{distribution.relative_folder}/src")
        for name in imported_modules(path)
        if name.split(".")[0] in ("pytest", "hypothesis", "gguf", "openai", "httpx")
    ]
    assert not found


def test_nothing_is_pickled():
    found = [
        f"{shown(path)}: {name}"
        for distribution in distributions()
        for path in python_files(f"{distribution.relative_folder}/src")
        for name in imported_modules(path)
        if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "marshal", "shelve")
    ]
    assert not found, "processes talk msgpack, and nothing is unpickled:\n" + "\n".join(found)
