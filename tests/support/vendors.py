"""Vendors for one test: a package in a folder of its own, installed for the processes that the test starts."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from repository import ROOT

KESTREL = ROOT / "plugins" / "kestrel" / "src" / "inferplane_kestrel"


class Vendor:
    """The package ``inferplane_<name>`` below ``site``, with the metadata that an installer would write."""

    def __init__(self, site: Path, name: str) -> None:
        self.site = site
        self.name = name
        self.package = site / f"inferplane_{name}"

    @classmethod
    def like_kestrel(cls, site: Path, name: str) -> Vendor:
        """A copy of the Kestrel platform under another name, for a test to spoil."""
        vendor = cls(site, name)
        vendor.package.mkdir(parents=True)
        for source in KESTREL.iterdir():
            if source.is_file():
                text = source.read_text(encoding="utf-8")
                text = text.replace("kestrel", name).replace("Kestrel", name.capitalize())
                (vendor.package / source.name).write_text(text, encoding="utf-8")
        vendor.write_metadata()
        return vendor

    def write_metadata(self) -> None:
        info = self.site / f"inferplane_{self.name}-1.0.dist-info"
        info.mkdir()
        fields = {
            "Metadata-Version": "2.4",
            "Name": f"inferplane-{self.name}",
            "Version": "1.0",
            "Summary": "A platform",
            "License-Expression": "Apache-2.0",
            "Requires-Python": ">=3.11",
            "Requires-Dist": "inferplane>=0.1.0",
        }
        lines = [f"{field}: {value}\n" for field, value in fields.items()]
        (info / "METADATA").write_text("".join(lines))
        (info / "entry_points.txt").write_text(
            f"[inferplane.plugins]\n{self.name} = inferplane_{self.name}.plugin\n"
        )

    def replace(self, file: str, old: str, new: str) -> None:
        """In one file of the package, where ``old`` must stand exactly once."""
        path = self.package / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def remove_functions(self, file: str, *names: str) -> None:
        """From the module, with their decorators."""
        path = self.package / file
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kept = [node for node in tree.body if getattr(node, "name", None) not in names]
        assert len(kept) == len(tree.body) - len(names), f"{file} has not all of {names}"
        removed = {
            number
            for node in tree.body
            if node not in kept and isinstance(node, ast.FunctionDef)
            for number in range(node.decorator_list[0].lineno, (node.end_lineno or 0) + 1)
        }
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for number, line in enumerate(lines, 1) if number not in removed))

    def num_lines(self) -> int:
        """Of all Python files."""
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in self.package.rglob("*.py"))

    def append(self, file: str, lines: str) -> None:
        with (self.package / file).open("a", encoding="utf-8") as text:
            text.write(lines)

    def inferplane(self, *arguments: str, timeout_s: float = 1200) -> subprocess.CompletedProcess[str]:
        """The command line where this vendor is installed."""
        command = [sys.executable, "-m", "inferplane.cli.main", *arguments]
        paths = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)

    def failures(self, *arguments: str) -> list[str]:
        """``file::test`` of each failure of ``inferplane conform --device NAME``; the status must agree."""
        done = self.inferplane("conform", "--device", self.name, *arguments)
        found = re.findall(r"^FAILED .*?(level_\d_\w+\.py::\w+)", done.stdout, re.M)
        assert done.returncode == (1 if found else 0), done.stdout + done.stderr
        return sorted(set(found))
