"""Declared failures: read, matched, and refused when they give no reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferplane_conformance.expected_failures import (
    FILE,
    DeclarationError,
    Xfail,
    read_xfails,
    stale_xfails,
)


def test_reading(tmp_path: Path):
    assert read_xfails(None) == read_xfails(tmp_path) == []
    (tmp_path / FILE).write_text('[[xfail]]\ntest = "level_2_ops.py::test_op[x*"\nreason = "no x yet"\n')
    [xfail] = read_xfails(tmp_path)
    assert xfail == Xfail("level_2_ops.py::test_op[x*", "no x yet")
    assert xfail.matches("level_2_ops.py::test_op[x-float32]")
    assert not xfail.matches("level_2_ops.py::test_op[y]")


@pytest.mark.parametrize("entry", ['test = "a"', 'test = "a"\nreason = ""', 'test = "a"\nreason = 3'])
def test_a_declaration_without_a_reason_is_refused(tmp_path: Path, entry: str):
    (tmp_path / FILE).write_text(f"[[xfail]]\n{entry}\n")
    with pytest.raises(DeclarationError, match="a test and a reason"):
        read_xfails(tmp_path)


def test_what_matches_nothing_is_stale():
    xfails = [Xfail("level_2_ops.py::gone", "r"), Xfail("level_3_linear.py::x", "r")]
    assert stale_xfails(xfails, ["level_2_ops.py::test_op[a]"], [2]) == xfails[:1]
