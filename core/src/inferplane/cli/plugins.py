"""``inferplane plugins``."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import click

from inferplane.cli.options import GroupedCommand, engine_options
from inferplane.config import EngineArgs


@click.group()
def plugins() -> None:
    """Show which plugins and devices were found, and why not."""


@plugins.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of the table.")
def list_plugins(as_json: bool) -> None:
    """Every plugin found, with its status and the reason for it."""
    from inferplane.cli.table import print_table
    from inferplane.plugins import load_plugins

    plugin_set = load_plugins()
    plugin_set.probe()
    rows = [asdict(record) for record in plugin_set.records]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    print_table(rows, ["name", "distribution", "version", "api", "status", "score", "reason"])
    for record in plugin_set.records:
        for note in record.notes:
            click.echo(f"note: {record.label}: {note}")


@plugins.command("doctor")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of lines.")
@click.option(
    "--timeout-s",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Time for each plugin, after which its process is ended.",
)
def doctor(names: tuple[str, ...], as_json: bool, timeout_s: float) -> None:
    """Examine plugins and their devices, each in a process of its own, and say how to mend what is wrong.

    Ends with 1 when something does not work.
    """
    from inferplane.api.diagnosis import Health
    from inferplane.plugins.doctor import examine

    findings = []
    for plugin, found in examine(names, timeout_s):
        findings.append({"plugin": plugin, **asdict(found)})
        if not as_json:
            click.echo(f"{found.health.upper():8}{plugin}: {found.check}: {found.found}")
            if found.mend:
                click.echo(f"{'':8}mend: {found.mend}")
    if as_json:
        click.echo(json.dumps(findings, indent=2))
    if any(each["health"] == Health.FAULT for each in findings):
        raise SystemExit(1)


@plugins.command("explain", cls=GroupedCommand)
@click.option("--model", "model_name", help="Like MODEL; for scripts that pass everything by option.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
@engine_options
def explain_plugins(engine_args: EngineArgs, model_name: str | None, as_json: bool) -> None:
    """Say who would run each part of MODEL, and why not another. A folder with a config.json is enough.

    Ends with 1 when a part has nobody.
    """
    if model_name is not None and engine_args.model is not None:
        raise click.UsageError("give MODEL or --model, not both")
    from inferplane.cli.explain import explanation_lines, explanation_object
    from inferplane.plugins import load_plugins
    from inferplane.plugins.explanation import explain

    args = engine_args if model_name is None else replace(engine_args, model=model_name)
    explanation = explain(args, load_plugins())
    if as_json:
        click.echo(json.dumps(explanation_object(explanation), indent=2))
    else:
        click.echo("\n".join(explanation_lines(explanation)))
    if not explanation.is_complete:
        raise SystemExit(1)
