"""One run of the kit's levels in this process, and of those that may be shared out in others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferplane_conformance.pytest_plugin import KitOptions, KitPlugin
from inferplane_conformance.workers import run_shares

LEVELS_FOLDER = Path(__file__).parent / "levels"


def run(options: KitOptions, keyword: str = "", *, is_verbose: bool = False) -> int:
    """Returns the status for the shell. Raises `ReportError` for an earlier report that it cannot add to."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what else is installed must not change the outcome
    kit = KitPlugin(options)
    if options.num_workers > 1:
        kit.take_over(run_shares(options, keyword))
    arguments = [
        "-c",
        str(LEVELS_FOLDER / "pytest.ini"),
        "--rootdir",
        str(LEVELS_FOLDER),
        "-p",
        "no:cacheprovider",
    ]
    arguments += ["-v"] if is_verbose else ["-q"]
    arguments += ["-k", keyword] if keyword else []
    arguments += [
        str(file) for level in options.levels for file in sorted(LEVELS_FOLDER.glob(f"level_{level}_*.py"))
    ]
    status = int(pytest.main(arguments, plugins=[kit]))
    return 0 if kit.has_passed else status or 1
