"""The table of formats and devices has every format, and is on its page."""

from __future__ import annotations

import json
import re

import format_matrix
from inferplane.quantization.registry import ONLINE, STORED
from repository import ROOT


def test_every_format_is_in_it():
    rows = json.loads(format_matrix.FILE.read_text(encoding="utf-8"))["rows"]
    stored = {row["format"] for row in rows if row["variant"] != "while loading"}
    online = {row["format"] for row in rows if row["variant"] == "while loading"}
    assert (stored, online) == (set(STORED), set(ONLINE))


def test_the_page_has_it():
    page = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    assert "```{format-matrix}\n```" in page
    table, _, reasons = format_matrix.format_matrix_markdown().partition("\n\n")
    assert "| fp8 | dynamic |" in table and "`cuda_fp8`" in table and "refused (" in table
    named = {int(number) for number in re.findall(r"\((\d+)\) \|", table)}
    numbered = [int(line.partition(".")[0]) for line in reasons.splitlines()]
    assert numbered == sorted(named) == list(range(1, len(numbered) + 1))
