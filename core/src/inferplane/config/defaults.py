"""Filling the settings that the user left open, and remembering who set what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from inferplane.config.args import EngineArgs
from inferplane.config.engine import ConfigError


@dataclass(frozen=True)
class ConfigPatch:
    """A platform's values for settings that the user left open, by field of `EngineArgs`."""

    values: Mapping[str, Any]
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why, in a few words each, for ``inferplane plugins explain``; may leave settings out."""


@dataclass(frozen=True)
class Setting:
    """One setting as it was resolved."""

    name: str
    value: Any
    set_by: str
    """``user``, ``inferplane``, or the name of the platform plugin."""
    reason: str | None = None


def fill(
    args: EngineArgs, answer: Mapping[str, Any] | ConfigPatch, platform: str
) -> tuple[EngineArgs, list[Setting]]:
    """``args`` with a platform's defaults where the user left them open, and who set each.

    Raises `ConfigError` when the platform names a setting that does not exist.
    """
    patch = answer if isinstance(answer, ConfigPatch) else ConfigPatch(answer)
    names = {each.name for each in fields(args)}
    if unknown := (patch.values.keys() | patch.reasons.keys()) - names:
        raise ConfigError(
            "device",
            f"platform {platform!r} gave defaults for unknown settings: {', '.join(sorted(unknown))}",
        )
    taken = {name: value for name, value in patch.values.items() if getattr(args, name) in (None, "auto")}
    filled = replace(args, **taken)
    followed = _follow(args, filled)
    settings = []
    for each in fields(args):
        name, value = each.name, getattr(followed, each.name)
        if value != getattr(filled, name):
            settings.append(Setting(name, value, "inferplane", "follows from the setting that it must fit"))
        elif name in taken:
            settings.append(Setting(name, value, platform, patch.reasons.get(name)))
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
