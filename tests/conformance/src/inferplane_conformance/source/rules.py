"""What a plugin's source may not do: change somebody else's modules, or import what is not the contract."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

OURS = "inferplane"
CONTRACT = "inferplane.api"
CHANGERS = (".update", ".pop", ".setdefault", ".clear", ".popitem", ".__setitem__")
PATCHES = ("unittest.mock.patch", "mock.patch")


def foreign_imports(file: Path) -> list[str]:
    """``file:line: module`` of each import of the core that is not `inferplane.api`."""
    return [
        f"{file.name}:{line}: {name}"
        for line, name in _imports(_parse(file))
        if name.split(".")[0] == OURS and name.split(".")[:2] != CONTRACT.split(".")
    ]


def monkeypatches(file: Path) -> list[str]:
    """``file:line: what`` of each statement that changes a module or class of somebody else.

    Found are assignments to, and deletions of, attributes of whatever a file imported; ``setattr`` and ``delattr`` on
    those; any change of ``sys.modules``; ``unittest.mock.patch``. Objects that the file made itself are its own.
    """
    tree = _parse(file)
    names = dict(_imported_names(tree))
    found = []
    for node in ast.walk(tree):
        for what in _changes(node, names):
            found.append(f"{file.name}:{getattr(node, 'lineno', 0)}: {what}")
    return found


def _changes(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    for target in _targets(node):
        for each in _unpacked(target):
            path = _path(each, names)
            if path is not None and isinstance(each, ast.Attribute):
                yield f"assigns {path}"
            base = _path(each.value, names) if isinstance(each, ast.Subscript) else None
            if base is not None and (
                base == "sys.modules" or base.endswith(".__dict__") or base.split(".")[0] == OURS
            ):
                yield f"assigns an item of {base}"
    if isinstance(node, ast.Call):
        called = _path(node.func, names)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in ("setattr", "delattr") and node.args and (path := _path(node.args[0], names)):
            yield f"{name} on {path}"
        if called is not None and called.startswith(PATCHES):
            yield f"calls {called}"
        if called is not None and called.rpartition(".")[0] == "sys.modules" and called.endswith(CHANGERS):
            yield f"calls {called}"


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return [node.target] if getattr(node, "value", None) is not None else []
    if isinstance(node, ast.Delete):
        return node.targets
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return [node.target]
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [item.optional_vars for item in node.items if item.optional_vars is not None]
    return []


def _unpacked(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from _unpacked(element)
    elif isinstance(target, ast.Starred):
        yield from _unpacked(target.value)
    else:
        yield target


def _path(node: ast.AST, names: dict[str, str]) -> str | None:
    """The dotted path of an expression that begins with an imported name, else None."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _path(node.value, names)
        return f"{base}.{node.attr}" if base else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        # importlib.import_module("inferplane.x") and __import__("inferplane.x") are the module
        called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            return str(node.args[0].value)
    return None


def _imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What each imported name of the file stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and (path := _path(node, {})):
            yield node.lineno, path


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), file.name)
