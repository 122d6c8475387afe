"""The plugin that adds ``new-platform`` to the command line. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from inferplane.api import CommandSpec, PluginManifest, hookimpl

MANIFEST = PluginManifest(name="vendor-template", api=(2, 0), provides=("template",))


@hookimpl
def cli_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            "new-platform",
            "inferplane_vendor_template.cli:new_platform",
            "Write the package of a new platform plugin.",
        ),
    )
