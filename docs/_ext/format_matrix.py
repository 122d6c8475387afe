"""The table of formats and devices as Markdown, from what `tests/support/format_cases.py` wrote."""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "formats.json"


def format_matrix_markdown() -> str:
    written = json.loads(FILE.read_text(encoding="utf-8"))
    devices = written["devices"]
    head = ["format", "variant", "weights", *(f"{name} ({device})" for name, device in devices.items())]
    rows = [[row["format"], row["variant"], row["scheme"], *map(row.get, devices)] for row in written["rows"]]
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"
