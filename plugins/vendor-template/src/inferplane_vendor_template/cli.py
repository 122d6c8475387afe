"""``inferplane new-platform``."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import click

from inferplane_vendor_template.writing import TemplateError, write_platform


@click.command()
@click.argument("name")
@click.option(
    "--into",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the new package; it must not exist. Default: inferplane-NAME here.",
)
def new_platform(name: str, folder: Path | None) -> None:
    """Writes the package of a platform called NAME, ready to install.

    NAME is what users will write after `--device`: small letters, digits and underscores.
    """
    for entry in entry_points(group="inferplane.plugins", name=name):
        owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
        raise click.ClickException(
            f"{name!r} is the name of an installed plugin, of {owner}: take another, or uninstall that one first"
        )
    folder = folder or Path(f"inferplane-{name}")
    try:
        files = write_platform(name, folder)
    except TemplateError as error:
        raise click.ClickException(str(error)) from None
    for file in files:
        click.echo(folder / file)
    click.echo(f"\nNext:\n  pip install -e {folder}\n  inferplane chat --device {name} --prompt Hello")
