"""How much of a plugin's source is a copy of the core's."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import inferplane

MIN_LENGTH = 25
"""Shorter lines are alike by chance."""
MAX_SHARE = 0.05
FEW_LINES = 100
"""A package with fewer lines to compare is measured as if it had so many, or five plain lines would be a copy."""


@dataclass(frozen=True)
class SharedLines:
    num_compared: int
    shared: tuple[str, ...]
    """``file:line: text`` of each line that the core has too."""

    @property
    def share(self) -> float:
        return len(self.shared) / max(self.num_compared, FEW_LINES)


def shared_lines(files: Sequence[Path]) -> SharedLines:
    """Compares lines of `MIN_LENGTH` characters and more, without their indentation.

    What the contract makes everybody write is not counted: imports, signatures of its methods and hooks, and any other
    line that stands in `inferplane.api`.
    """
    known, compared, shared = _core_lines(), 0, []
    for file in files:
        for number, line in _own_lines(file):
            compared += 1
            if line in known:
                shared.append(f"{file.name}:{number}: {line}")
    return SharedLines(compared, tuple(shared))


def count_lines(files: Iterable[Path]) -> int:
    """All lines, blank ones and comments included: what there is to read."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def _own_lines(file: Path) -> list[tuple[int, str]]:
    text = file.read_text(encoding="utf-8")
    contract = _contract_lines()
    dictated = {number for node in ast.walk(ast.parse(text)) for number in _dictated(node)}
    return [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), 1)
        if number not in dictated and len(line.strip()) >= MIN_LENGTH and line.strip() not in contract
    ]


def _dictated(node: ast.AST) -> range:
    """Lines of an import, or of the signature of a method or hook that the contract names."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in _contract_functions():
        return range(node.lineno, node.body[0].lineno)
    return range(0)


@cache
def _contract_functions() -> frozenset[str]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (_core() / "api").rglob("*.py"))
    return frozenset(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    )


@cache
def _core_lines() -> frozenset[str]:
    return _lines(path for path in _core().rglob("*.py") if not path.is_relative_to(_core() / "api"))


@cache
def _contract_lines() -> frozenset[str]:
    return _lines((_core() / "api").rglob("*.py"))


def _core() -> Path:
    return Path(inferplane.__file__).parent


def _lines(files: Iterable[Path]) -> frozenset[str]:
    return frozenset(line.strip() for file in files for line in file.read_text(encoding="utf-8").splitlines())
