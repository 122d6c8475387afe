"""``inferplane plugins``."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


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
