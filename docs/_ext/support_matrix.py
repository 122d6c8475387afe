"""The support matrix as Markdown, from the reports of the conformance kit that are committed.

A platform of this repository without a report was never tested. ``docs/vendors/compiled.toml``, if it is there, names
platforms whose kernels were compiled for hardware that nobody had: ``name = "what was compiled"``.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "docs" / "vendors" / "reports"
COMPILED = ROOT / "docs" / "vendors" / "compiled.toml"


def support_matrix_markdown() -> str:
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(REPORTS.glob("*.json"))]
    compiled = tomllib.loads(COMPILED.read_text(encoding="utf-8")) if COMPILED.exists() else {}
    named = {path.parent.name for path in ROOT.glob("platforms/*/pyproject.toml")}
    silent = named - {report["subject"]["platform"] for report in reports}
    rows = [_row(report, compiled) for report in reports]
    rows += [[name, "never run", "no report", *[""] * 6] for name in sorted(silent)]
    head = ["platform", "state", "tested", *(f"L{level}" for level in range(6))]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def _row(report: dict[str, Any], compiled: dict[str, str]) -> list[str]:
    subject = report["subject"]
    name = subject["platform"]
    if subject["absence"] is None:
        state = f"run on {subject['device'].partition('(')[2].rstrip(')')}"
    elif name in compiled:
        state = f"compiled only: {compiled[name]}"
    else:
        state = f"never run: {subject['absence']}"
    quick = ", a quick run" if report.get("quick") else ""
    tested = f"{subject['distribution']}, torch {subject['torch']}{quick}"
    return [name, state, tested, *(_level(report["levels"].get(str(level))) for level in range(6))]


def _level(counts: dict[str, int] | None) -> str:
    """How many of a level's tests passed, and what came of the others."""
    if counts is None:
        return "not run"
    parts = [str(counts["passed"])]
    parts += [
        f"{counts[kind]} {kind.replace('_', ' ')}"
        for kind in ("failed", "skipped", "xfailed", "not_run")
        if counts.get(kind)
    ]
    return ", ".join(parts)
