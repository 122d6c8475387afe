"""A platform of the previous plugin API keeps the contract too, through the adapter and without an edit."""

from __future__ import annotations

from pathlib import Path

import pytest

import elder_plugin
from vendors import Vendor

ONE_RANK = """
[[xfail]]
test = "level_3_collectives.py::*"
reason = "one rank only"

[[xfail]]
test = "level_4_engine.py::test_tensor_parallel"
reason = "one rank only"
"""


@pytest.fixture
def vendor(tmp_path: Path) -> Vendor:
    vendor = Vendor(tmp_path / "site", "elder")
    vendor.package.mkdir(parents=True)
    (vendor.package / "__init__.py").touch()
    source = Path(elder_plugin.__file__).read_text(encoding="utf-8")
    (vendor.package / "plugin.py").write_text(source, encoding="utf-8")
    (vendor.package / "conformance.toml").write_text(ONE_RANK, encoding="utf-8")
    vendor.write_metadata()
    return vendor


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_it_keeps_the_contract(vendor: Vendor) -> None:
    levels = [option for level in range(1, 5) for option in ("--only", str(level))]
    assert vendor.failures(*levels) == []
