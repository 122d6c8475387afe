"""What the installed triton compiles for, read from its files: importing it takes seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def why_no_triton(backend: str) -> str | None:
    """None where triton is installed and has this backend of its compiler (``nvidia``, ``amd``, ``intel``)."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return "triton is not installed"
    backends = Path(spec.origin).with_name("backends")
    if backends.is_dir() and not (backends / backend).is_dir():
        known = ", ".join(
            sorted(path.name for path in backends.iterdir() if (path / "compiler.py").is_file())
        )
        return f"the installed triton compiles for {known or 'nothing'}, not for {backend}"
    return None
