"""The plugin that adds ``conform`` to the command line. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from inferplane.api import CommandSpec, PluginManifest, hookimpl

MANIFEST = PluginManifest(name="conformance", api=(2, 0), provides=("conformance kit",))


@hookimpl
def cli_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            "conform",
            "inferplane_conformance.cli:conform",
            "Test whether a platform keeps the plugin contract.",
        ),
    )
