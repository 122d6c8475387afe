"""A platform written from the template keeps the contract as it comes."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from inferplane.api import DeviceDescriptor
from inferplane.api.config import ConfigError, EngineConfig
from inferplane_vendor_template.writing import write_platform
from repository import ROOT
from vendors import KESTREL, Vendor

YOURS = "Yours:"


@pytest.fixture
def vendor(tmp_path: Path) -> Vendor:
    write_platform("northwind", tmp_path / "new")
    vendor = Vendor(tmp_path / "new" / "src", "northwind")
    vendor.write_metadata()
    return vendor


def test_it_is_packaged_as_the_contract_wants_it(vendor: Vendor):
    assert vendor.failures("--level", "0") == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_keeps_the_contract_to_the_last_level(vendor: Vendor):
    assert vendor.failures("--soak", "3") == []


def functions(
    tree: ast.Module | ast.ClassDef, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef, bool]]:
    """Functions and methods by dotted name, and whether the template leaves them to the vendor."""
    is_yours = prefix != "" and YOURS in (ast.get_docstring(tree) or "")
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node, is_yours or YOURS in (ast.get_docstring(node) or "")


def code(function: ast.FunctionDef) -> str:
    """Without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return ast.unparse(ast.FunctionDef(**{**vars(function), "body": body or [ast.Pass()]}))


@pytest.fixture
def filled_in(tmp_path: Path) -> Path:
    """The template under Kestrel's name."""
    write_platform("kestrel", tmp_path / "kestrel")
    return tmp_path / "kestrel"


def test_kestrel_is_the_template_filled_in(filled_in: Path) -> None:
    """What the template does not leave to the vendor stands in Kestrel as it was written."""
    kept, changed = [], []
    for file in sorted((filled_in / "src/inferplane_kestrel").glob("*.py")):
        own_file = KESTREL / file.name
        own = {name: node for name, node, _ in functions(ast.parse(own_file.read_text()))}
        for name, function, is_yours in functions(ast.parse(file.read_text())):
            assert name in own, f"{own_file.name} has no {name}"
            assert ast.unparse(own[name].args) == ast.unparse(function.args)
            if is_yours:
                changed.append(name)
            else:
                assert code(own[name]) == code(function), f"{own_file.name}: {name}"
                kept.append(name)
    assert set(kept) == {
        "create_platform",
        "op_implementations",
        "KestrelPlatform.device_runtime",
        "KestrelPlatform.worker_class",
    }
    assert "find_devices" in changed


def test_kestrel_is_packaged_as_the_template_has_it(filled_in: Path) -> None:
    written, own = (
        tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (filled_in, KESTREL.parents[1])
    )
    assert own["build-system"] == written["build-system"]
    for field in ("name", "entry-points", "dependencies", "requires-python", "license"):
        assert own["project"][field] == written["project"][field]
    assert (
        own["tool"]["hatch"]["build"]["targets"]["wheel"]
        == written["tool"]["hatch"]["build"]["targets"]["wheel"]
    )


def test_the_refusal_that_the_page_shows_is_one() -> None:
    page = (ROOT / "docs/vendors/write-a-platform.md").read_text(encoding="utf-8")
    names = {"ConfigError": ConfigError, "DeviceDescriptor": DeviceDescriptor, "EngineConfig": EngineConfig}
    exec(re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)[1], names)  # type: ignore[index]
    config = SimpleNamespace(model=SimpleNamespace(dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"^Acme 1 has no bfloat16") as caught:
        names["validate_config"](None, config, DeviceDescriptor("acme", 0, "Acme 1", 1 << 30))
    assert caught.value.option == "dtype"
    config.model.dtype = "float16"
    names["validate_config"](None, config, DeviceDescriptor("acme", 0, "Acme 1", 1 << 30))
