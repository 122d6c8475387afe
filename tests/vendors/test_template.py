"""A platform written from the template keeps the contract as it comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferplane_vendor_template.writing import write_platform
from vendors import Vendor


@pytest.fixture
def vendor(tmp_path: Path) -> Vendor:
    write_platform("northwind", tmp_path / "new")
    vendor = Vendor(tmp_path / "new" / "src", "northwind")
    vendor.write_metadata()
    return vendor


def test_it_is_packaged_as_the_contract_wants_it(vendor: Vendor):
    assert vendor.failures("--level", "0") == []


@pytest.mark.slow
def test_it_keeps_the_contract_to_the_last_level(vendor: Vendor):
    assert vendor.failures("--soak", "3") == []
