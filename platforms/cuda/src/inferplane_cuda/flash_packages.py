"""Whether FlashAttention-4 is installed, told from files: importing it takes seconds."""

from __future__ import annotations

import importlib.util
from importlib.machinery import PathFinder

NEEDED = {"flash_attn.cute": "flash-attn-4", "cutlass.cute": "nvidia-cutlass-dsl"}
"""Modules that it computes by, and the packages that bring them."""
CAPABILITY = "bulk_tensor_copy"
"""Of GPUs that it is used with."""
BLOCK_SIZE = 128
"""Tokens that it reads at a time, for most heads: a block of as many is one bulk copy."""


def missing_package() -> str | None:
    """The first of the packages that is not installed; None when all are."""
    return next((package for module, package in NEEDED.items() if not _is_there(module)), None)


def _is_there(module: str) -> bool:
    """Nothing is imported. Older packages of the same name lack the part behind the dot."""
    package, part = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    folders = spec.submodule_search_locations if spec is not None else None
    return folders is not None and PathFinder.find_spec(f"{package}.{part}", list(folders)) is not None
