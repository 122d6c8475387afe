"""What the installed torch was built for, read from its files: importing it would take seconds."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TorchBuild:
    version: str
    interfaces: dict[str, str]
    """The versions of the device interfaces that it was built with: some of ``cuda``, ``hip`` and ``xpu``."""


def read_torch_build() -> TorchBuild | None:
    """None for an unusual build that does not tell. Raises `ImportError` when there is no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError("torch is not installed")
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = dict(re.findall(r"^(\w+)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    interfaces = {name: found[name] for name in ("cuda", "hip", "xpu") if name in found}
    return TorchBuild(found.get("__version__", "of unknown version"), interfaces)


def why_not_built_for(interface: str, name: str) -> str | None:
    """Why the installed torch cannot use devices with ``interface`` (``name`` is what people call it); None when it
    can, or does not tell."""
    try:
        build = read_torch_build()
    except ImportError as error:
        return str(error)
    if build is None or interface in build.interfaces:
        return None
    return f"torch {build.version} is built without {name}; install a torch build for {name}"
