"""What ``inferplane plugins explain`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from inferplane.models.fallback import FALLBACK

if TYPE_CHECKING:
    from inferplane.plugins.explanation import Choice, Explanation, GroupOfKV

HEADINGS = {
    "op": "ops",
    "attention": "attention layers",
    "linear": "linear layers",
    "quantized": "quantized linear layers",
    "experts": "quantized experts",
}


def explanation_lines(explanation: Explanation) -> Iterator[str]:
    device = explanation.device
    yield f"device   {device.platform}:{device.index} ({device.name})"
    yield f"model    {explanation.config.model.architecture} from {explanation.config.model.path}"
    how = ", the fallback: transformers' implementation" if explanation.implementation == FALLBACK else ""
    yield f"run by   {explanation.implementation}{how}"
    yield "settings"
    for setting in explanation.settings:
        if setting.value not in (None, {}):
            reason = f": {setting.reason}" if setting.reason else ""
            yield f"  {setting.name} = {setting.value}, set by {setting.set_by}{reason}"
    for kind in dict.fromkeys(choice.kind for choice in explanation.choices):
        yield HEADINGS[kind]
        for choice in explanation.choices:
            if choice.kind == kind:
                yield from _choice_lines(choice)
    yield "KV groups"
    for group in explanation.kv_groups:
        yield from _group_lines(group)


def _choice_lines(choice: Choice) -> Iterator[str]:
    winner = choice.decision.winner
    won = f"{winner.name} (plugin {winner.plugin}, priority {winner.priority})" if winner else "NOBODY"
    yield f"  {_counted(choice.subjects)} ({choice.detail}): {won}"
    for index, candidate in enumerate(choice.decision.candidates):
        if candidate is not winner:
            yield f"    not {candidate.name} (plugin {candidate.plugin}): {choice.losing_reason(index)}"


def _group_lines(group: GroupOfKV) -> Iterator[str]:
    kept = f"kept by {group.manager}" if group.manager else f"NOBODY keeps it: {group.reason}"
    yield f"  {_counted(group.layer_names)} ({group.spec}, blocks of pool {group.pool}): {kept}"


def _counted(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more like it"


def explanation_object(explanation: Explanation) -> dict[str, Any]:
    """For ``--json``."""
    device = explanation.device
    return {
        "device": {**asdict(device), "capabilities": list(device.capabilities)},
        "model": explanation.config.model.model,
        "architecture": explanation.config.model.architecture,
        "implementation": explanation.implementation,
        "settings": [asdict(setting) for setting in explanation.settings],
        "choices": [_choice_object(choice) for choice in explanation.choices],
        "kv_groups": [
            {
                "layers": list(group.layer_names),
                "spec": {"class": type(group.spec).__name__, **asdict(group.spec)},
                "block_bytes": group.spec.block_bytes,
                "pool": group.pool,
                "manager": group.manager,
                "reason": group.reason,
            }
            for group in explanation.kv_groups
        ],
    }


def _choice_object(choice: Choice) -> Mapping[str, Any]:
    candidates, winner = choice.decision.candidates, choice.decision.winner
    return {
        "kind": choice.kind,
        "subjects": list(choice.subjects),
        "detail": choice.detail,
        "chosen": None
        if winner is None
        else {"name": winner.name, "plugin": winner.plugin, "priority": winner.priority},
        "rejected": [
            {
                "name": each.name,
                "plugin": each.plugin,
                "priority": each.priority,
                "reason": choice.losing_reason(index),
            }
            for index, each in enumerate(candidates)
            if each is not winner
        ],
    }
