"""Plain aligned columns on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click


def print_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Prints ``columns`` of ``rows`` under upper-case headings; None shows as ``-``."""
    cells = [[c.upper().replace("_", " ") for c in columns]]
    cells += [[_text(row.get(c)) for c in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
