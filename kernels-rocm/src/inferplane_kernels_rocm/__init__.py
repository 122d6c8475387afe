"""Launch configurations of InferPlane's Triton kernels for AMD GPUs, and the architectures they are compiled for."""

from __future__ import annotations

from pathlib import Path

ARCHITECTURES = ("gfx942", "gfx950", "gfx1100")
"""MI300, MI350 (both with wavefronts of 64) and RX 7900 (32)."""

_TUNING = Path(__file__).parent / "tuning"


def tuning_file(architecture: str) -> Path | None:
    """The table for an architecture such as ``gfx942`` (``gcnArchName`` up to its first colon); None for others."""
    path = _TUNING / f"{architecture}.json"
    return path if path.is_file() else None
