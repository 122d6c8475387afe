"""Reading single values of a Hugging Face configuration, which may hold anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from inferplane.models.errors import ModelLoadError


def whole_number(
    hf_config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1
) -> int:
    """A count or size. ``default`` stands for a missing key and for null; without one both are refused by name."""
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelLoadError(
            f"{key} should be a whole number of at least {least} in the model's config, but is {value!r}"
        )
    return value


def positive_number(hf_config: Mapping[str, Any], key: str, default: float) -> float:
    """``default`` stands for a missing key and for null."""
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ModelLoadError(f"{key} should be a positive number in the model's config, but is {value!r}")
    return float(value)


def number(hf_config: Mapping[str, Any], key: str, default: float) -> float:
    """Of any sign; ``default`` stands for a missing key and for null."""
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelLoadError(f"{key} should be a number in the model's config, but is {value!r}")
    return float(value)


def optional_number(hf_config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """A positive number; ``default`` stands for a missing key, and null means none."""
    return None if hf_config.get(key, default) is None else positive_number(hf_config, key, default or 0.0)


def flag(hf_config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """``default`` stands for a missing key and for null."""
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ModelLoadError(f"{key} should be true or false in the model's config, but is {value!r}")
    return value


def text(hf_config: Mapping[str, Any], key: str, default: str) -> str:
    """``default`` stands for a missing key and for null."""
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, str):
        raise ModelLoadError(f"{key} should be a text in the model's config, but is {value!r}")
    return value
