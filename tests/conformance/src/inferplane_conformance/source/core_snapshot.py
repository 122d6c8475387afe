"""Whether loading a plugin changes the core: its modules and classes before and after, in a process of its own.

    python -m inferplane_conformance.source.core_snapshot PLATFORM:INDEX

prints a JSON list of what changed. All of the core is imported first; then the plugin is loaded, probed and asked for
everything that it brings for the device, and every module of its package is imported.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import inferplane

_IGNORED = ("__warningregistry__", "__annotations__", "__abstractmethods__")


def snapshot() -> dict[str, int]:
    """Identity of every attribute of every loaded module and class of the core, by dotted path."""
    found: dict[str, int] = {}
    for name, module in sorted(sys.modules.items()):
        if isinstance(module, ModuleType) and (name == "inferplane" or name.startswith("inferplane.")):
            found.update(_members(name, module))
    return found


def _members(name: str, module: ModuleType) -> Iterator[tuple[str, int]]:
    for attribute, value in vars(module).items():
        if attribute in _IGNORED or isinstance(value, ModuleType):
            continue
        yield f"{name}.{attribute}", id(value)
        if isinstance(value, dict):
            yield from ((f"{name}.{attribute}[{key!r}]", id(item)) for key, item in value.items())
        if isinstance(value, type) and value.__module__ == name:
            for member, inner in vars(value).items():
                if member not in _IGNORED and not member.startswith("_abc_"):
                    yield f"{name}.{attribute}.{member}", id(inner)


def changed(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Paths whose value is another one, new, or gone. Modules that were not loaded before are no change."""
    modules = {path.rpartition(".")[0] for path in before}
    return sorted(
        path
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path) and (path in before or path.rpartition(".")[0] in modules)
    )


def load_core() -> None:
    """Imports every module of the core that can be imported here."""
    for module in pkgutil.walk_packages(inferplane.__path__, "inferplane."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in inferplane.__all__:  # made when they are first asked for
        getattr(inferplane, name)


def load_plugin(requested: str) -> None:
    """Everything that a worker would ask of the plugin, and the rest of its package."""
    import torch

    from inferplane_conformance.subject import Subject

    subject = Subject(requested)
    plugins, device = subject.plugins, subject.device
    for hook in ("attention_backends", "op_implementations", "linear_kernels"):
        plugins.collect(hook, device)
    plugins.resolve_ops(device, torch.float32)
    subject.platform.worker_class()
    if subject.package is not None:
        name = subject.package.name
        for module in pkgutil.walk_packages([str(subject.package)], f"{name}."):
            if not module.name.endswith("__main__"):
                _import_optional(module.name)


def _import_optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:  # a provider for a library that is not installed here
        return None


def main() -> None:
    load_core()
    import inferplane_conformance.subject  # noqa: F401 - the kit's own imports are no change by the plugin

    before = snapshot()
    load_plugin(sys.argv[1])
    print(json.dumps(changed(before, snapshot())))


if __name__ == "__main__":
    main()
