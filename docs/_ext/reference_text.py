"""Reference pages as Markdown, written from the code, so that the documentation cannot fall behind it.

Tests read what the pages will say. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import click


def hook_functions() -> dict[str, Callable[..., Any]]:
    """Every hook that a plugin may implement, by name, in the order of its file."""
    from inferplane.api import hookspecs

    marker = f"{hookspecs.PROJECT}_spec"
    return {name: value for name, value in vars(hookspecs).items() if hasattr(value, marker)}


def hooks_markdown() -> str:
    from inferplane.api import hookspecs

    parts: list[str] = []
    for name, hook in hook_functions().items():
        is_first_result = getattr(hook, f"{hookspecs.PROJECT}_spec").get("firstresult", False)
        answers = (
            "The first result that is not None wins." if is_first_result else "Every plugin's result counts."
        )
        signature = str(inspect.signature(hook)).replace("'", "")
        parts += [
            f"## {name}",
            "",
            f"```python\n{name}{signature}\n```",
            "",
            inspect.getdoc(hook) or "",
            "",
            answers,
            "",
        ]
    return _as_markdown("\n".join(parts))


def commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command with its full name (`inferplane bench serve`), those that plugins add included."""
    from inferplane.cli.main import cli

    yield from _below(cli, click.Context(cli, info_name="inferplane"))


def _below(
    command: click.Command, context: click.Context
) -> Iterator[tuple[str, click.Command, click.Context]]:
    yield context.command_path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            sub = command.get_command(context, name)
            if sub is None:
                raise LookupError(f"{context.command_path} lists {name}, but has no such command")
            if not sub.hidden:
                yield from _below(sub, click.Context(sub, info_name=name, parent=context))


def command_line_markdown() -> str:
    return "\n".join(
        line for name, command, context in commands() for line in _command_lines(name, command, context)
    )


def _command_lines(name: str, command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield from (
        f"## {name}",
        "",
        f"```text\n{usage}\n```",
        "",
        _as_markdown(inspect.cleandoc(command.help or "")),
        "",
    )
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    if options:
        yield from ("| option | meaning |", "|---|---|")
        yield from (_option_row(option, context) for option in options)
        yield ""


def _option_row(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag or option.count else f" `{option.make_metavar(context)}`".replace("|", "\\|")
    default = option.to_info_dict().get("default")
    is_shown = isinstance(default, (str, int, float)) and not isinstance(default, bool) and default != ""
    meaning = (option.help or "").replace("|", "\\|") + (f" Default: `{default}`." if is_shown else "")
    return f"| {names}{value} | {_as_markdown(meaning)} |"


def environment_markdown() -> str:
    from inferplane.config.environment import ENVIRONMENT

    rows = [f"| `{variable.name}` | {variable.help} |" for variable in ENVIRONMENT.values()]
    return "\n".join(["| variable | meaning |", "|---|---|", *rows])


def engine_options_markdown() -> str:
    """The settings that `LLM(...)` takes by name and the command line as options, in their groups."""
    from inferplane.config import EngineArgs

    parts: list[str] = []
    group = None
    for field in dataclasses.fields(EngineArgs):
        if "group" not in field.metadata:
            continue
        if field.metadata["group"] != group:
            group = field.metadata["group"]
            parts += ["", f"### {group}", "", "| setting | default | meaning |", "|---|---|---|"]
        default = "" if field.default is None else f"`{field.default}`"
        help_text = field.metadata["help"].replace("|", "\\|")
        parts.append(f"| `{field.name}` | {default} | {help_text} |")
    return "\n".join(parts)


def _as_markdown(text: str) -> str:
    """Docstrings mark code with two backticks, as reStructuredText does; Markdown reads those just as well."""
    return text.replace("\b", "").replace("<", "\\<").replace("\\<=", "<=")
