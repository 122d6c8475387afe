"""The table of formats and devices as Markdown, from what `tests/support/format_cases.py` wrote."""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "formats.json"


def format_matrix_markdown() -> str:
    written = json.loads(FILE.read_text(encoding="utf-8"))
    devices = written["devices"]
    reasons: dict[str, int] = {}

    def cell(found: str) -> str:
        """A kernel's name, or what happens else with the number of the reason."""
        what, _, reason = found.partition(": ")
        return what if not reason else f"{what} ({reasons.setdefault(reason, len(reasons) + 1)})"

    head = ["format", "variant", "weights", *(f"{name} ({device})" for name, device in devices.items())]
    rows = [
        [row["format"], row["variant"], row["scheme"], *(cell(row[name]) for name in devices)]
        for row in written["rows"]
    ]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    numbered = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([*lines, "", *numbered]) + "\n"
