"""What plugins' hooks answer, as the core keeps it."""

from __future__ import annotations

from typing import Any

_MAPPINGS = frozenset(
    {
        "collect_env",
        "executors",
        "kv_cache_specs",
        "logits_processors",
        "model_sources",
        "models",
        "quant_formats",
        "scheduler_policies",
        "weight_loaders",
    }
)


def checked_answer(plugin: str, hook: str, answer: Any) -> Any:
    """What the answer becomes: a dict of what has names, else a list.

    Raises whatever an answer of another form does, for which the plugin is blamed.
    """
    if hook in _MAPPINGS:
        return dict(answer)
    if hook == "cli_commands":
        return {spec.name: spec for spec in answer}
    if hook == "engine_options":
        for spec in answer:
            if not spec.name.startswith(f"{plugin}_"):
                raise ValueError(f"option {spec.name!r} must begin with {plugin + '_'!r}")
        return {spec.name: spec for spec in answer}
    return list(answer)
