"""Command-line options made from the fields of `EngineArgs`, and commands whose help shows them in groups."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

import click

from inferplane.api.hookspecs import OptionSpec
from inferplane.config.args import EngineArgs

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


class ByteSize(click.ParamType):
    """``1073741824``, ``512MiB``, ``1.5GiB``."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", value.strip().lower())
        if not match or match[2] not in _UNITS:
            self.fail(f"{value!r} is no size; write bytes or a number with KiB, MiB or GiB", param, ctx)
        try:
            return int(float(match[1]) * _UNITS[match[2]])
        except ValueError:
            self.fail(f"{value!r} is no number", param, ctx)


class GroupedOption(click.Option):
    """An option with the heading under which help lists it."""

    def __init__(self, *args: Any, group: str = "General", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help lists options under the headings of their groups, in order of first appearance."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                sections.setdefault(getattr(param, "group", "General"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the MODEL argument and one option for each engine setting, those that installed plugins declare
    among them; it receives ``engine_args``."""
    engine_fields = [f for f in fields(EngineArgs) if f.name not in ("model", "plugin_options")]
    declared = _plugin_options()

    @functools.wraps(command)
    def with_engine_args(*args: Any, **kwargs: Any) -> Any:
        values = {f.name: kwargs.pop(f.name) for f in engine_fields}
        values["plugin_options"] = {spec.name: kwargs.pop(spec.name) for spec in declared}
        return command(*args, engine_args=EngineArgs(model=kwargs.pop("model"), **values), **kwargs)

    for spec in reversed(declared):
        with_engine_args = _plugin_option(spec)(with_engine_args)
    for engine_field in reversed(engine_fields):
        with_engine_args = _option(engine_field)(with_engine_args)
    return click.argument("model", required=False, metavar="[MODEL]")(with_engine_args)


def _plugin_options() -> list[OptionSpec]:
    from inferplane.plugins import load_plugins

    return list(load_plugins(quiet=True).engine_options().values())


def _plugin_option(spec: OptionSpec) -> Callable[..., Any]:
    flag = "--" + spec.name.replace("_", "-")
    settings: dict[str, Any] = {
        "cls": GroupedOption,
        "group": "Plugins",
        "help": spec.help,
        "default": spec.default,
    }
    if spec.kind is bool:
        off = f"--no-{flag.removeprefix('--')}"
        return click.option(f"{flag}/{off}", spec.name, **settings)
    settings["type"] = click.Choice(spec.choices) if spec.choices else spec.kind
    return click.option(flag, spec.name, show_default=spec.default is not None, **settings)


def _option(engine_field: Field[Any]) -> Callable[..., Any]:
    cli = dict(engine_field.metadata)
    name, default = engine_field.name, engine_field.default
    flag = "--" + name.replace("_", "-")
    settings: dict[str, Any] = {
        "cls": GroupedOption,
        "group": cli["group"],
        "help": cli["help"],
        "default": default,
    }
    if "bool | None" in str(engine_field.type):
        return click.option(f"{flag}/--no-{flag.removeprefix('--')}", name, **settings)
    if default is True:
        off = "--no-" + name.removeprefix("enable_").replace("_", "-")
        return click.option(off, name, flag_value=False, **settings)
    if default is False:
        return click.option(flag, name, is_flag=True, **settings)
    if choices := cli.get("choices"):
        settings["type"] = click.Choice(choices)
    elif cli.get("type") == "bytes":
        settings["type"] = ByteSize()
    else:
        kinds = {"int": int, "float": float}
        settings["type"] = kinds.get(str(engine_field.type).partition(" ")[0], str)
    return click.option(flag, name, show_default=default is not None, **settings)
