"""The public surface of `inferplane.api` as text, read from the sources without importing them.

    python tests/support/api_surface.py             writes the snapshot of the current API version
    python tests/support/api_surface.py --freeze    the same, and from then on that version may not change

One line for each name, base class, field, parameter list and hook. What an API module hands on from elsewhere in the
core is part of the surface, and is listed where it is defined.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "core/src"
SNAPSHOTS = ROOT / "tests/meta/api_surface"
COMMAND = "python tests/support/api_surface.py"
LAZY = {"inferplane.api.worker.ModelWorker": "inferplane.runner.worker.ModelWorker"}
"""Handed on by a module's `__getattr__`, which no reading of the source can follow."""

Version = tuple[int, int]
Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


class Surface:
    """Collects lines; every definition once."""

    def __init__(self, sources: Path) -> None:
        self._sources = sources
        self._trees: dict[str, ast.Module] = {}
        self._seen: set[str] = set()
        self.lines: set[str] = set()

    def add_module(self, module: str) -> None:
        tree = self._tree(module)
        listed = _all_names(tree)
        for name, origin in _imported(tree).items():
            if name in listed:
                self.lines.add(f"{module}.{name} = {self.add(origin)}")
        for name in _defined(tree):
            if not name.startswith("_") and (not listed or name in listed):
                self.add(f"{module}.{name}")
        for name, origin in LAZY.items():
            if name.startswith(f"{module}."):
                self.lines.add(f"{name} = {self.add(origin)}")

    def add(self, full_name: str) -> str:
        """The name under which the definition is listed, after following imports to it."""
        if not full_name.startswith("inferplane."):
            return full_name  # another library's
        module, _, name = full_name.rpartition(".")
        tree = self._tree(module)
        if (definition := _defined(tree).get(name)) is None:
            origin = _imported(tree).get(name)
            return full_name if origin is None else self.add(origin)  # without an origin it is a module
        if full_name not in self._seen:
            self._seen.add(full_name)
            self.lines.update(_lines(full_name, definition))
        return full_name

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            path = self._sources / module.replace(".", "/")
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            self._trees[module] = ast.parse(file.read_text(encoding="utf-8"))
        return self._trees[module]


def surface(sources: Path = SOURCES) -> list[str]:
    found = Surface(sources)
    for file in sorted((sources / "inferplane/api").glob("*.py")):
        found.add_module(f"inferplane.api{'' if file.stem == '__init__' else '.' + file.stem}")
    return sorted(found.lines)


def api_version(sources: Path = SOURCES) -> Version:
    tree = ast.parse((sources / "inferplane/api/manifest.py").read_text(encoding="utf-8"))
    assign = _defined(tree)["API_VERSION"]
    assert isinstance(assign, ast.Assign)
    return ast.literal_eval(assign.value)


# --- what a file defines


def _all_names(tree: ast.Module) -> set[str]:
    assign = _defined(tree).get("__all__")
    return set(ast.literal_eval(assign.value)) if isinstance(assign, ast.Assign) else set()


def _defined(tree: ast.Module) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def _imported(tree: ast.Module) -> dict[str, str]:
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


# --- lines of one definition


def _lines(name: str, node: Definition) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        yield name + _signature(node)
    elif isinstance(node, ast.AnnAssign):
        yield f"{name}: {ast.unparse(node.annotation)}"
    elif isinstance(node, ast.Assign):
        yield f"{name} is a value"  # which one is its own business: a constant may be tuned
    else:
        yield from _class_lines(name, node)


def _class_lines(name: str, node: ast.ClassDef) -> Iterator[str]:
    yield f"{name}({', '.join(ast.unparse(base) for base in [*node.bases, *node.keywords])})" + _decorators(
        node
    )
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            if not member.target.id.startswith("_"):
                default = " = …" if member.value is not None else ""
                yield f"{name}.{member.target.id}: {ast.unparse(member.annotation)}{default}"
        elif isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name):
            if not member.targets[0].id.startswith("_"):
                yield f"{name}.{member.targets[0].id} = …"
        elif isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(member.name):
            yield f"{name}.{member.name}{_signature(member)}"


def _is_public(method: str) -> bool:
    return method in ("__init__", "__call__") or not method.startswith("_")


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Which default a parameter has is its own business; that it has one is not."""
    some = ast.Name("…")
    parameters = ast.arguments(
        posonlyargs=node.args.posonlyargs,
        args=node.args.args,
        vararg=node.args.vararg,
        kwonlyargs=node.args.kwonlyargs,
        kw_defaults=[default and some for default in node.args.kw_defaults],
        kwarg=node.args.kwarg,
        defaults=[some for _ in node.args.defaults],
    )
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(parameters)}){returns}{_decorators(node)}"


def _decorators(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    names = [ast.unparse(each) for each in node.decorator_list]
    public = [name for name in names if not name.startswith("_")]
    return f"  [{', '.join(public)}]" if public else ""


# --- versions


def breaks(old: set[str], new: set[str]) -> list[str]:
    """Lines that a plugin written against ``old`` may trip over: what is gone or changed, and what it must now add."""
    classes = {line.split("(")[0] for line in old if "(" in line}

    def must_be_added(line: str) -> bool:
        owner = re.split(r"[(:]| = ", line)[0].rpartition(".")[0]
        is_field = re.fullmatch(r"[\w.]+: (?!ClassVar).*(?<! = …)", line) is not None
        return owner in classes and ("abstractmethod" in line or is_field)

    return sorted(
        [*(f"- {line}" for line in old - new), *(f"+ {line}" for line in new - old if must_be_added(line))]
    )


def needed_version(released: Version, old: set[str], new: set[str]) -> Version:
    """The least version that a surface ``new`` may have after ``old`` was released as ``released``."""
    if breaks(old, new):
        return released[0] + 1, 0
    return (released[0], released[1] + 1) if new - old else released


def snapshot_file(version: Version, folder: Path = SNAPSHOTS) -> Path:
    return folder / f"{version[0]}.{version[1]}.txt"


def read_snapshot(file: Path) -> tuple[bool, set[str]]:
    """(whether it is frozen, its lines)."""
    head, *lines = file.read_text(encoding="utf-8").splitlines()
    return head.endswith("frozen"), set(lines)


def newest_frozen(folder: Path = SNAPSHOTS) -> tuple[Version, set[str]] | None:
    found: list[tuple[Version, set[str]]] = []
    for file in folder.glob("*.txt"):
        is_frozen, lines = read_snapshot(file)
        if is_frozen:
            major, minor = file.stem.split(".")
            found.append(((int(major), int(minor)), lines))
    return max(found, key=lambda each: each[0], default=None)


def fault(version: Version, lines: set[str], folder: Path = SNAPSHOTS) -> str | None:
    """Why ``lines`` may not be the surface of ``version``; None when they may."""
    if released := newest_frozen(folder):
        needed = needed_version(*released, lines)
        if version < needed:
            changed = breaks(released[1], lines) or sorted(f"+ {line}" for line in lines - released[1])
            kind = "breaks" if needed[0] > released[0][0] else "adds to"
            return (
                f"the change {kind} API {_text(released[0])}, which is released: make API_VERSION {needed} in "
                f"api/manifest.py, then run: {COMMAND}\n" + "\n".join(changed[:20])
            )
    file = snapshot_file(version, folder)
    if not file.exists():
        return f"there is no snapshot of API {_text(version)}; write it with: {COMMAND}"
    known = read_snapshot(file)[1]
    if known == lines:
        return None
    changed = [
        *(f"- {line}" for line in sorted(known - lines)),
        *(f"+ {line}" for line in sorted(lines - known)),
    ]
    return f"the plugin API changed; look at the change, then write it down with: {COMMAND}\n" + "\n".join(
        changed[:20]
    )


def _text(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def write(version: Version, lines: list[str], is_frozen: bool, folder: Path = SNAPSHOTS) -> None:
    file = snapshot_file(version, folder)
    if file.exists():
        was_frozen, known = read_snapshot(file)
        if was_frozen and known != set(lines):
            sys.exit(fault(version, set(lines), folder))
        is_frozen |= was_frozen
    state = "frozen" if is_frozen else "open"
    file.write_text("\n".join([f"# inferplane.api {_text(version)}, {state}", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    write(api_version(), surface(), "--freeze" in sys.argv)
