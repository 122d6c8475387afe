"""JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inferplane.models.errors import ModelLoadError


def read_json_table(path: Path) -> dict[str, Any]:
    """The object in a file. Raises `ModelLoadError` naming the file where there is none."""
    try:
        table = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is no valid JSON ({error})") from error
    if not isinstance(table, dict):
        raise ModelLoadError(f"{path}: should hold a JSON object, but holds {type(table).__name__}")
    return table


def read_optional_json_table(path: Path) -> dict[str, Any]:
    """As `read_json_table`, but empty where there is no such file."""
    return read_json_table(path) if path.is_file() else {}
