"""Models that ship code. None of it ever runs here; the question is only whether the model works without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inferplane.models.errors import ModelLoadError
from inferplane.models.json_file import read_optional_json_table

_FILES = (
    "config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
)


def remote_code_references(folder: Path) -> tuple[str, ...]:
    """Where the files of a model name code of their repository, as ``file: place``."""
    found: list[str] = []
    for name in _FILES:
        _collect(read_optional_json_table(folder / name), name, found)
    return tuple(found)


def refuse_unknown_code(
    folder: Path,
    hf_config: Mapping[str, Any],
    is_known_architecture: Callable[[str], bool],
) -> None:
    """Refuses a model that works only by its own code; an architecture that is known here needs none.

    Raises `ModelLoadError` naming the places that refer to code.
    """
    architectures = hf_config.get("architectures") or []
    if any(isinstance(name, str) and is_known_architecture(name) for name in architectures):
        return
    references = remote_code_references(folder)
    if references:
        raise ModelLoadError(
            f"{folder}: architecture {', '.join(map(str, architectures)) or 'none'} is code of the model's repository "
            f"({'; '.join(references)}), which never runs here; a plugin with a model of that name can serve it"
        )


def _collect(value: Any, place: str, found: list[str]) -> None:
    if isinstance(value, Mapping):
        if value.get("auto_map"):
            found.append(f"{place}: auto_map")
        for key, item in value.items():
            if key != "auto_map":
                _collect(item, f"{place}: {key}", found)
