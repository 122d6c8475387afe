"""Filling the settings that the user left open, and remembering who set what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from inferplane.config.args import EngineArgs
from inferplane.config.engine import ConfigError


class ConfigPatch(Mapping[str, Any]):
    """A platform's values for settings that the user left open, by field of `EngineArgs`, with its reasons.

    ``reasons`` says in a few words why, for ``inferplane plugins explain``; it may leave settings out.
    """

    def __init__(self, values: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
        self._values = dict(values)
        self.reasons = dict(reasons)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


STREAM_SETTINGS = frozenset({"max_num_mixed_prompt_tokens"})
"""Settings that give up some throughput so that streams do not stall."""


def without_streams(defaults: Mapping[str, Any]) -> ConfigPatch:
    """A platform's defaults for an engine that gives whole batches to `LLM`, where nobody waits between tokens."""
    reasons = defaults.reasons if isinstance(defaults, ConfigPatch) else {}
    return ConfigPatch(
        {name: value for name, value in defaults.items() if name not in STREAM_SETTINGS},
        {name: reason for name, reason in reasons.items() if name not in STREAM_SETTINGS},
    )


@dataclass(frozen=True)
class Setting:
    """One setting as it was resolved."""

    name: str
    value: Any
    set_by: str
    """``user``, ``inferplane``, or the name of the platform plugin."""
    reason: str | None = None


def fill(args: EngineArgs, defaults: Mapping[str, Any], platform: str) -> tuple[EngineArgs, list[Setting]]:
    """``args`` with a platform's defaults where the user left them open, and who set each.

    Raises `ConfigError` when the platform names a setting that does not exist.
    """
    reasons = defaults.reasons if isinstance(defaults, ConfigPatch) else {}
    names = {each.name for each in fields(args)}
    if unknown := (defaults.keys() | reasons.keys()) - names:
        raise ConfigError(
            "device",
            f"platform {platform!r} gave defaults for unknown settings: {', '.join(sorted(unknown))}",
        )
    taken = {name: value for name, value in defaults.items() if getattr(args, name) in (None, "auto")}
    filled = replace(args, **taken)
    followed = _follow(args, filled)
    settings = []
    for each in fields(args):
        name, value = each.name, getattr(followed, each.name)
        if value != getattr(filled, name):
            settings.append(Setting(name, value, "inferplane", "follows from the setting that it must fit"))
        elif name in taken:
            settings.append(Setting(name, value, platform, reasons.get(name)))
        else:
            is_default = each.name == "plugin_options" or value == each.default
            settings.append(Setting(name, value, "inferplane" if is_default else "user"))
    return followed, settings


def _follow(args: EngineArgs, filled: EngineArgs) -> EngineArgs:
    """Of two settings that must fit, what the user chose stays and what was left open follows."""
    num_seqs, budget = filled.max_num_seqs, filled.max_num_batched_tokens
    if num_seqs is not None and budget is not None and budget < num_seqs:
        if args.max_num_seqs is None:
            return replace(filled, max_num_seqs=budget)
        if args.max_num_batched_tokens is None:
            return replace(filled, max_num_batched_tokens=num_seqs)
    return filled
