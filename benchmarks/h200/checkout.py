"""Makes a checkout's distributions visible to Python without installing them: paths, versions and entry points.

For machines that reach no package registry and lack the build backend. As a command it runs another there:

    python3 benchmarks/h200/checkout.py [--packages DIR] -- python3 -m inferplane.cli.main plugins list
"""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

FOLDERS = ("core", "server", "kernels-*", "platforms/*", "plugins/*", "tests/conformance")
SITE = "import site\nfor folder in {folders!r}:\n    site.addsitedir(folder)\n"


def environment(root: Path, packages: Iterable[Path] = ()) -> dict[str, str]:
    """This process's environment variables with the checkout at ``root`` and the unpacked packages importable.

    A package folder's ``.pth`` files count, which PYTHONPATH alone would ignore.
    """
    site = Path(tempfile.mkdtemp(prefix="inferplane-checkout-"))
    sources = []
    for pyproject in sorted(path for pattern in FOLDERS for path in root.glob(f"{pattern}/pyproject.toml")):
        write_metadata(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"], site)
        sources.append(pyproject.parent / "src")
    folders = [str(folder.resolve()) for folder in packages]
    (site / "sitecustomize.py").write_text(SITE.format(folders=folders))
    paths = [str(site), *map(str, sources), str(root / "tests/support"), *folders]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }


def write_metadata(project: Mapping[str, object], site: Path) -> None:
    """A ``.dist-info`` folder for one ``[project]`` table, with what `importlib.metadata` reads."""
    name, version = str(project["name"]), str(project["version"])
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    required: list[str] = project.get("dependencies", [])  # type: ignore[assignment]
    fields = [
        ("Metadata-Version", "2.4"),
        ("Name", name),
        ("Version", version),
        ("Summary", project["description"]),
        ("License-Expression", project["license"]),
        ("Requires-Python", project["requires-python"]),
        *(("Requires-Dist", requirement) for requirement in required),
    ]
    (folder / "METADATA").write_text("".join(f"{field}: {value}\n" for field, value in fields))
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}  # type: ignore[dict-item]
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))


def main() -> None:
    arguments, command = sys.argv[1:], []
    if "--" in arguments:
        split = arguments.index("--")
        arguments, command = arguments[:split], arguments[split + 1 :]
    packages = [Path(value) for flag, value in pairwise(arguments) if flag == "--packages"]
    if not command:
        raise SystemExit(__doc__)
    os.execvpe(command[0], command, environment(Path(__file__).resolve().parents[2], packages))


if __name__ == "__main__":
    main()
