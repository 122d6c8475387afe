"""What a vendor declares that its platform cannot do yet: ``conformance.toml`` in the plugin's package.

    [[xfail]]
    test = "level_2_ops.py::test_op[rotary-float16]"
    reason = "the compiler folds the cast"

``test`` may end in ``*``. A test that passes although it is declared fails the run, so that a declaration ends with
its reason.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inferplane_conformance.level import level_of

FILE = "conformance.toml"


class DeclarationError(ValueError):
    """``conformance.toml`` says something that the kit does not understand."""


@dataclass(frozen=True)
class Xfail:
    test: str
    reason: str

    def matches(self, test: str) -> bool:
        if self.test.endswith("*"):
            return test.startswith(self.test.removesuffix("*"))
        return test == self.test


def read_xfails(package: Path | None) -> list[Xfail]:
    """Raises `DeclarationError` for an entry without a test or a reason."""
    file = package / FILE if package else None
    if file is None or not file.is_file():
        return []
    entries = tomllib.loads(file.read_text(encoding="utf-8")).get("xfail", [])
    for entry in entries:
        if set(entry) != {"test", "reason"} or not all(isinstance(v, str) and v for v in entry.values()):
            raise DeclarationError(f"{FILE}: an xfail has a test and a reason, both texts, not {entry!r}")
    return [Xfail(**entry) for entry in entries]


def stale_xfails(xfails: Sequence[Xfail], tests: Sequence[str], levels: Sequence[int]) -> list[Xfail]:
    """Those that match no test of the levels that ran."""
    return [
        xfail
        for xfail in xfails
        if level_of(xfail.test) in levels and not any(xfail.matches(test) for test in tests)
    ]
