"""A report in parts: a later run replaces its own levels, and what another left undone counts until it is done."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from inferplane_conformance.cli import conform
from inferplane_conformance.report import Report, ReportError, Result, read_report

SUBJECT = {"device": "acme:0 (Acme)", "num_lines": 0, "distribution": "inferplane-acme 1.0"}


def run_of(
    levels: dict[int, list[str]], *, num_selected: int | None = None, is_quick: bool = False
) -> Report:
    """A run with tests of these outcomes at each level."""
    results = [
        Result(level, f"level_{level}_x.py::test_{number}", outcome, "", 1.0)
        for level, outcomes in levels.items()
        for number, outcome in enumerate(outcomes)
    ]
    selected = {level: num_selected or len(outcomes) for level, outcomes in levels.items()}
    has_passed = all(each.outcome != "failed" for each in results) and num_selected is None
    return Report(dict(SUBJECT), has_passed, list(levels), is_quick, Counter(selected), [], results, 2.0)


def write(report: Report, file: Path, *, is_added: bool = True) -> dict[str, Any]:
    report.write(file, read_report(file, SUBJECT) if is_added and file.exists() else None)
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def test_levels_come_together(tmp_path: Path) -> None:
    file = tmp_path / "acme.json"
    write(run_of({0: ["passed"], 2: ["passed", "skipped"]}), file)
    content = write(run_of({1: ["passed"], 2: ["passed"]}, is_quick=True), file)
    assert content["passed"] and content["quick"] and content["seconds"] == 4.0
    assert list(content["levels"]) == ["0", "1", "2"]
    assert content["levels"]["2"] == {"passed": 1, "failed": 0, "skipped": 0, "xfailed": 0, "not_run": 0}
    assert [result["level"] for result in content["results"]] == [0, 1, 2]
    assert "level_0_x.py::test_0" in file.with_suffix(".html").read_text()


def test_what_failed_or_was_left_is_not_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "acme.json"
    stopped = run_of({3: ["passed"]}, num_selected=5)
    assert "level 3 components: 1 passed, 4 not run" in stopped.summary()
    assert not write(stopped, file)["passed"]
    content = write(run_of({4: ["passed"]}), file)
    assert (content["levels"]["3"]["not_run"], content["passed"]) == (4, False)
    assert not write(run_of({3: ["passed", "failed"]}), file)["passed"]
    assert write(run_of({3: ["passed", "xfailed"]}), file)["passed"]


def test_another_subject_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "acme.json"
    write(run_of({0: ["passed"]}), file)
    with pytest.raises(ReportError, match=r"acme.json cannot be added to, it is of another device, torch"):
        read_report(file, {**SUBJECT, "device": "acme:1", "torch": "3.0"})


def test_there_must_be_a_report_to_add_to() -> None:
    done = CliRunner().invoke(conform, ["--device", "reference", "--add"])
    assert done.exit_code == 2
    assert "--add needs --report" in done.output
