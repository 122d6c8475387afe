"""``inferplane conform``."""

from __future__ import annotations

import json
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
    "--add",
    "is_added",
    is_flag=True,
    help="Keep what the report has of levels that this run does not have. It must be of the same subject.",
)
@click.option(
    "-k", "keyword", default="", metavar="EXPRESSION", help="Run just the tests that pytest's -k selects."
)
@click.option(
    "--soak", "soak_s", type=float, help="Seconds of the serving soak: 10, or 2 with --quick, without it."
)
@click.option(
    "--quick",
    "is_quick",
    is_flag=True,
    help="One seed, one size of blocks, fewer pairs, a short soak: finds most faults in a part of the time.",
)
@click.option(
    "--limit",
    "limit_s",
    type=float,
    metavar="SECONDS",
    help="Start no test after so many seconds: the report then has those that ran, and says failed.",
)
@click.option(
    "--workers",
    "num_workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that share ops, attention and products. A device that compiles kernels is done sooner.",
)
@click.option(
    "--mode",
    type=click.Choice(("test", "perf", "support")),
    default="test",
    show_default=True,
    help="test runs the levels; support lists who serves each op, and perf how long a call of it takes.",
)
@click.option("-v", "--verbose", is_flag=True, help="One line for each test.")
def conform(
    device: str,
    level: int,
    only: tuple[int, ...],
    report: Path | None,
    is_added: bool,
    keyword: str,
    soak_s: float | None,
    is_quick: bool,
    limit_s: float | None,
    num_workers: int,
    mode: str,
    verbose: bool,
) -> None:
    """Tests whether a platform keeps the plugin contract, level by level.

    Ends with status 0 when every test passed, was skipped for a missing capability or is a declared xfail.
    """
    if mode != "test":
        _list_ops(device, mode, report)
        return
    if is_added and report is None:
        raise click.UsageError("--add needs --report, the report that it adds to")
    from inferplane_conformance.pytest_plugin import KitOptions
    from inferplane_conformance.report import ReportError
    from inferplane_conformance.running import run

    if soak_s is None:
        soak_s = 2.0 if is_quick else 10.0
    options = KitOptions(
        device=device,
        levels=tuple(only) or tuple(range(level + 1)),
        report=report,
        is_added=is_added,
        soak_s=soak_s,
        is_quick=is_quick,
        limit_s=limit_s,
        num_workers=num_workers,
    )
    try:
        sys.exit(run(options, keyword, is_verbose=verbose))
    except ReportError as error:
        raise click.ClickException(str(error)) from None


def _list_ops(device: str, mode: str, report: Path | None) -> None:
    from inferplane.cli.table import print_table
    from inferplane_conformance import op_modes
    from inferplane_conformance.subject import Subject

    subject = Subject(device)
    if subject.absence:
        raise click.ClickException(f"there is no device: {subject.absence}")
    if mode == "perf":
        rows = list(op_modes.perf_rows(subject))
        print_table(rows, op_modes.PERF_COLUMNS)
    else:
        rows = list(op_modes.support_rows(subject))
        print_table(rows, op_modes.SUPPORT_COLUMNS)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
