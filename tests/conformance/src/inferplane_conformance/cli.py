"""``inferplane conform``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from inferplane_conformance.level import LEVELS


@click.command()
@click.option("--device", required=True, help="Platform to test, as `plugins list` names it: NAME or NAME:1.")
@click.option(
    "--level",
    type=click.IntRange(0, max(LEVELS)),
    default=max(LEVELS),
    show_default=True,
    help="Highest level to run: 0 packaging, 1 contract, 2 ops, 3 components, 4 engine, 5 serving.",
)
@click.option(
    "--only",
    type=click.IntRange(0, max(LEVELS)),
    multiple=True,
    help="Run just this level; may be given more than once.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the results here as JSON, and beside it the same as a page of HTML.",
)
@click.option(
    "-k", "keyword", default="", metavar="EXPRESSION", help="Run just the tests that pytest's -k selects."
)
@click.option(
    "--soak", "soak_s", type=float, default=10.0, show_default=True, help="Seconds of the serving soak."
)
@click.option("-v", "--verbose", is_flag=True, help="One line for each test.")
def conform(
    device: str,
    level: int,
    only: tuple[int, ...],
    report: Path | None,
    keyword: str,
    soak_s: float,
    verbose: bool,
) -> None:
    """Tests whether a platform keeps the plugin contract, level by level.

    Ends with status 0 when every test passed, was skipped for a missing capability or is a declared xfail.
    """
    import pytest

    from inferplane_conformance.pytest_plugin import KitOptions, KitPlugin

    levels = tuple(only) or tuple(range(level + 1))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # what else is installed must not change the outcome
    kit = KitPlugin(KitOptions(device=device, levels=levels, report=report, soak_s=soak_s))
    folder = Path(__file__).parent / "levels"
    arguments = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "-p", "no:cacheprovider"]
    arguments += ["-v"] if verbose else ["-q"]
    arguments += ["-k", keyword] if keyword else []
    arguments += [str(file) for number in levels for file in sorted(folder.glob(f"level_{number}_*.py"))]
    sys.exit(int(pytest.main(arguments, plugins=[kit])))
