"""``inferplane models``."""

from __future__ import annotations

import json

import click


@click.group()
def models() -> None:
    """List known architectures, fetch the demo model."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of the table.")
def list_models(as_json: bool) -> None:
    """Architectures that can be served, by their Hugging Face name."""
    from inferplane.cli.table import print_table
    from inferplane.models.registry import known_architectures
    from inferplane.plugins import load_plugins

    known = known_architectures(load_plugins().models())
    rows = [{"architecture": name, "implementation": target} for name, target in sorted(known.items())]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    print_table(rows, ["architecture", "implementation"])


@models.command("pull")
@click.argument("model", default="demo")
def pull(model: str) -> None:
    """Fetch MODEL (default: the demo model) into the cache ahead of time, and print where it lies."""
    from inferplane.models.source import resolve_model
    from inferplane.plugins import load_plugins

    click.echo(resolve_model(model, fetchers=load_plugins().model_sources()).path)
