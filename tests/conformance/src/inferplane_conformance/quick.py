"""Which cases a quick run has of those that differ in two things at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def crossed(rows: Iterable[str], columns: Iterable[str], row: str, column: str) -> list[Any]:
    """Every pair as a pytest parameter. Those with neither ``row`` nor ``column`` are marked as thorough: where
    kernels are compiled for each pair, it takes seconds."""
    return [
        pytest.param(
            one,
            other,
            id=f"{one}-{other}",
            marks=[] if one == row or other == column else [pytest.mark.thorough],
        )
        for one in rows
        for other in columns
    ]
