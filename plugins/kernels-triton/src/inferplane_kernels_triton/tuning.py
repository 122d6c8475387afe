"""Tuned launch configurations: JSON that a vendor's kernels distribution ships, looked up by kernel and shape.

A file is ``{"source": "…", "kernels": {"matvec": {"6144x4096": {"rows": 4, …}, "*": {…}}}}``. A shape that is not
listed gets the entry whose dimensions are nearest in proportion, and ``*`` where no entry has as many dimensions.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

Config = TypeVar("Config")


class TuningTable:
    """The configurations of one device."""

    def __init__(self, kernels: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
        self._any = {kernel: dict(entries["*"]) for kernel, entries in kernels.items() if "*" in entries}
        self._by_shape = {
            kernel: {
                tuple(map(int, shape.split("x"))): dict(entry)
                for shape, entry in entries.items()
                if shape != "*"
            }
            for kernel, entries in kernels.items()
        }

    @classmethod
    def read(cls, path: Path) -> TuningTable:
        """Raises ValueError that names the file where it is not such a table."""
        try:
            return cls(json.loads(path.read_text(encoding="utf-8"))["kernels"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a tuning table: {type(error).__name__}: {error}") from error

    def config(self, kernel: str, shape: tuple[int, ...], default: Config) -> Config:
        """``default`` with what the table says of this kernel and shape put in its place.

        ``default`` is the kernel's configuration dataclass. Raises TypeError for an entry with a field it has not.
        """
        return dataclasses.replace(default, **self._entry(kernel, shape))  # type: ignore[type-var]

    def measured(self, kernel: str, shape: tuple[int, ...], default: Config) -> Config | None:
        """As `config` for a shape that is listed itself; None for any other."""
        entry = self._by_shape.get(kernel, {}).get(shape)
        return None if entry is None else dataclasses.replace(default, **entry)  # type: ignore[type-var]

    def _entry(self, kernel: str, shape: tuple[int, ...]) -> dict[str, Any]:
        alike = [known for known in self._by_shape.get(kernel, {}) if len(known) == len(shape)]
        if not alike:
            return self._any.get(kernel, {})
        nearest = min(alike, key=lambda known: sum(abs(math.log(a / b)) for a, b in zip(known, shape)))
        return self._by_shape[kernel][nearest]
