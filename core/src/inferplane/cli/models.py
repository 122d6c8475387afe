"""``inferplane models``."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.group()
def models() -> None:
    """List known architectures, fetch the demo model."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of the table.")
def list_models(as_json: bool) -> None:
    """Architectures that can be served, by their Hugging Face name: what each does, keeps and is tested on. The last
    row, *, is every other decoder that the fallback runs."""
    from inferplane.cli.table import print_table
    from inferplane.models.catalog import CATALOG, OTHER_DECODERS
    from inferplane.models.fallback import FALLBACK
    from inferplane.models.registry import BUILT_IN, known_architectures
    from inferplane.models.task import tasks_of
    from inferplane.plugins import load_plugins

    rows = []
    for name, target in known_architectures(load_plugins().models()).items():
        # of a plugin's class that takes the place of a built-in one nothing is known
        facts = CATALOG.get(name) if BUILT_IN.get(name) == target else None
        known = {} if facts is None else asdict(facts)
        rows.append({"architecture": name, "tasks": tasks_of(name), **known, "implementation": target})
    rows.append(
        {"architecture": "*", "tasks": ("generate",), **asdict(OTHER_DECODERS), "implementation": FALLBACK}
    )
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        row.update({key: ", ".join(value) or None for key, value in row.items() if isinstance(value, tuple)})
    print_table(rows, ["architecture", "tasks", "family", "features", "kv_specs", "tested", "implementation"])


@models.command("pull")
@click.argument("model", default="demo")
def pull(model: str) -> None:
    """Fetch MODEL (default: the demo model) into the cache ahead of time, and print where it lies."""
    from inferplane.models.source import resolve_model
    from inferplane.plugins import load_plugins

    click.echo(resolve_model(model, fetchers=load_plugins().model_sources()).path)
