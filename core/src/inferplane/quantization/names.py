"""Which layers a configuration speaks of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from inferplane.api.quant import QuantConfigError


def name_list(config: Mapping[str, Any], *keys: str) -> list[str]:
    """The first of ``keys`` that is there; an empty list where none is."""
    for key in keys:
        names = config.get(key)
        if names is not None:
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise QuantConfigError(f"{key} should be a list of names, but is {names!r}")
            return names
    return []


def is_among(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern names the layer or a part of the model that it is in: whole parts of its dotted name, or a
    regular expression behind ``re:``, which has to match from the beginning."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if matches(pattern[3:], name):
                return True
        elif f".{pattern}." in f".{name}.":
            return True
    return False


def with_stars(name: str) -> str:
    """A name in which stars stand for anything, as a pattern of `is_among`."""
    return "re:" + re.escape(name).replace(r"\*", ".*") if "*" in name else name


def matches(expression: str, name: str) -> bool:
    """Raises `QuantConfigError` for what is no regular expression."""
    try:
        return re.match(expression, name) is not None
    except re.error as error:
        raise QuantConfigError(f"{expression!r} is no regular expression: {error}") from error
