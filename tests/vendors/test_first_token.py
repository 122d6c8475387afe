"""A first token needs at most 400 lines of a vendor: no kernels, no attention, no collectives of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vendors import Vendor

MAX_LINES = 400


@pytest.fixture
def vendor(tmp_path: Path) -> Vendor:
    """The Kestrel platform without what only makes it faster, and without its way to be several cards."""
    vendor = Vendor.like_kestrel(tmp_path / "site", "bare")
    for file in ("attention.py", "ops.py", "communicator.py"):
        (vendor.package / file).unlink()
    vendor.remove_functions("plugin.py", "attention_backends", "op_implementations")
    return vendor


@pytest.mark.slow
def test_few_lines_serve_a_token(vendor: Vendor, tiny_model: Callable[[str], Path]) -> None:
    folder = str(tiny_model("llama"))
    assert vendor.num_lines() <= MAX_LINES
    arguments = ("chat", folder, "--prompt", "You may", "--max-tokens", "8", "--dtype", "float32")
    done, expected = (vendor.inferplane(*arguments, "--device", name) for name in ("bare", "reference"))
    assert done.returncode == expected.returncode == 0, done.stderr + expected.stderr
    assert done.stdout == expected.stdout != ""
    explained = vendor.inferplane("plugins", "explain", "--model", folder, "--device", "bare", "--json")
    assert explained.returncode == 0, explained.stderr
    assert "inferplane_bare" not in explained.stdout


@pytest.mark.slow
def test_the_kit_counts_the_lines_of_a_first_token(vendor: Vendor, tmp_path: Path) -> None:
    report = tmp_path / "bare.json"
    assert vendor.failures("--only", "0", "-k", "typed", "--report", str(report)) == []
    subject = json.loads(report.read_text())["subject"]
    assert subject["num_first_token_lines"] == subject["num_lines"] == vendor.num_lines()


@pytest.mark.slow
def test_kernels_are_not_among_them(tmp_path: Path) -> None:
    vendor, report = Vendor.like_kestrel(tmp_path / "site", "whole"), tmp_path / "whole.json"
    done = vendor.inferplane(
        "conform", "--device", "whole", "--only", "0", "-k", "typed", "--report", str(report)
    )
    subject = json.loads(report.read_text())["subject"]
    assert subject["num_first_token_lines"] <= MAX_LINES < subject["num_lines"] == vendor.num_lines()
    assert f"of which a first token needs {subject['num_first_token_lines']};" in done.stdout
