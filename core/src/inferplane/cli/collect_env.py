"""``inferplane collect-env``."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import click

PACKAGES = (
    "inferplane",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pluggy",
    "msgspec",
    "pyzmq",
)


@click.command("collect-env")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def collect_env(as_json: bool) -> None:
    """Print facts for a bug report: versions, machine, plugins, settings. No secrets."""
    facts = _facts()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name.ljust(width)}  {value}")


def _facts() -> dict[str, str]:
    from inferplane.plugins import load_plugins

    facts = {
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": str(os.cpu_count()),
    }
    facts |= {f"package {name}": _version(name) for name in PACKAGES}
    plugin_set = load_plugins()
    plugin_set.probe()
    for record in plugin_set.records:
        facts[f"plugin {record.name}"] = f"{record.distribution} {record.version}: {record.status}"
    for plugin, found in plugin_set.collect_env().items():
        facts |= {f"{plugin} {name}": value for name, value in found.items()}
    hidden = ("KEY", "TOKEN", "SECRET")
    for name in sorted(os.environ):
        if name.startswith("INFERPLANE_") and not any(word in name for word in hidden):
            facts[f"environment {name}"] = os.environ[name]
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
