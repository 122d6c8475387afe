"""Entry point: a click group whose sub-commands are imported when they are run."""

from __future__ import annotations

import importlib
import logging
import sys
from importlib.metadata import version

import click

from inferplane.api.hookspecs import CommandSpec

BUILT_IN = (
    CommandSpec("chat", "inferplane.cli.chat:chat", "Talk to a model in this terminal."),
    CommandSpec("bench", "inferplane.cli.bench:bench", "Measure throughput, latency, serving and start-up."),
    CommandSpec("models", "inferplane.cli.models:models", "List known architectures, fetch the demo model."),
    CommandSpec(
        "plugins", "inferplane.cli.plugins:plugins", "Show which plugins and devices were found, and why not."
    ),
    CommandSpec(
        "quantize",
        "inferplane.cli.quantize:quantize",
        "Write a model with its weights rounded to fewer bits.",
    ),
    CommandSpec("collect-env", "inferplane.cli.collect_env:collect_env", "Print facts for a bug report."),
)

EXTRAS = {"serve": "server"}
"""Commands that come with a distribution of ours; named here only to say how to get it."""


class LazyGroup(click.Group):
    """Sub-commands from `BUILT_IN` and from plugins' ``cli_commands`` hook."""

    def _commands(self) -> dict[str, CommandSpec]:
        from inferplane.plugins import load_plugins

        plugin_commands = load_plugins().commands()
        commands = {spec.name: spec for spec in (*plugin_commands, *BUILT_IN)}
        return {
            name: spec for name, spec in commands.items() if " " not in name
        }  # those belong to a group below

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        spec = next((s for s in BUILT_IN if s.name == cmd_name), None) or self._commands().get(cmd_name)
        if spec is None:
            if extra := EXTRAS.get(cmd_name):
                raise click.UsageError(
                    f'"{cmd_name}" is not installed; get it with: pip install "inferplane[{extra}]"'
                )
            return None
        module, attribute = spec.target.split(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # from the specs: asking each command for its help would import it
        with formatter.section("Commands"):
            formatter.write_dl([(name, spec.help) for name, spec in sorted(self._commands().items())])


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"inferplane {version('inferplane')}")
        ctx.exit()


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Serve large language models on any device."""


def main() -> None:
    """Runs the command line; errors that users can mend are printed without a traceback, those of a
    plugin's code with its own frames and its name."""
    from inferplane.config.engine import ConfigError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        cli.main(prog_name="inferplane", standalone_mode=True)
    except ConfigError as error:
        _fail(f"--{error.option.replace('_', '-')}: {error}")
    except Exception as error:
        if _is_for_users(error) and isinstance(error, (ValueError, OSError, RuntimeError)):
            _fail(str(error))
        from inferplane.plugins.blame import blame

        if (fault := blame(error)) is None:
            raise
        click.echo(fault.traceback, err=True)
        _fail(fault.message)


def _is_for_users(error: Exception) -> bool:
    """Whether the error is one of ours, which say what to mend; any other keeps its traceback."""
    return type(error).__module__.partition(".")[0].startswith("inferplane")


def _fail(message: str) -> None:
    click.echo(f"error: {message}", err=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
