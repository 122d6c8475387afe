"""Filling in the template: files of a package called ``inferplane-acme`` under another name."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

TEMPLATE = Path(__file__).parent / "template"
PLACEHOLDER = "acme"
"""In contents and names of the template's files; ``Acme`` in names of classes."""
NOT_A_FILE_YET = ".in"
"""Suffix of files that a tool would mistake for those of this package."""
TAKEN = ("auto", "reference")


class TemplateError(ValueError):
    """The name cannot be a platform's, or the folder is there already."""


def write_platform(name: str, folder: Path) -> list[Path]:
    """Returns the files that were written, relative to ``folder``. Raises `TemplateError`."""
    if name in TAKEN or keyword.iskeyword(name):
        owner = "InferPlane" if name in TAKEN else "Python"
        raise TemplateError(f"a platform cannot be called {name!r}: the name is {owner}'s own")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise TemplateError(
            f"a platform cannot be called {name!r}: use small letters, digits and underscores, beginning with a letter"
        )
    if folder.exists():
        raise TemplateError(f"{folder} exists already; give another folder with --into")
    written = []
    for source in sorted(path for path in TEMPLATE.rglob("*") if path.is_file()):
        if "__pycache__" in source.parts:
            continue
        relative = source.relative_to(TEMPLATE).as_posix().removesuffix(NOT_A_FILE_YET)
        target = Path(fill_in(relative, name))
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        (folder / target).write_text(fill_in(source.read_text(encoding="utf-8"), name), encoding="utf-8")
        written.append(target)
    return written


def fill_in(text: str, name: str) -> str:
    """The text with ``name`` for the placeholder."""
    class_name = "".join(word.capitalize() for word in name.split("_"))
    return text.replace(PLACEHOLDER.capitalize(), class_name).replace(PLACEHOLDER, name)
