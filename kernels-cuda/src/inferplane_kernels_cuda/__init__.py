"""Tuned launch configurations and NVIDIA-only products of InferPlane."""

from __future__ import annotations

from pathlib import Path

_TUNING = Path(__file__).parent / "tuning"


def tuning_file(capability: tuple[int, int]) -> Path | None:
    """The table for a compute capability such as (9, 0); None where nothing was measured."""
    path = _TUNING / f"sm{capability[0]}{capability[1]}.json"
    return path if path.is_file() else None
