"""The plugin that adds ``serve`` and ``bench serve`` to the command line. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from inferplane.api import CommandSpec, PluginManifest, hookimpl

MANIFEST = PluginManifest(name="server", api=(2, 0), provides=("server",))


@hookimpl
def cli_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec("serve", "inferplane_server.cli:serve", "Serve a model over HTTP to OpenAI clients."),
        CommandSpec(
            "bench serve",
            "inferplane_server.bench_serve:bench_serve_command",
            "Load a running server with streams.",
        ),
    )
