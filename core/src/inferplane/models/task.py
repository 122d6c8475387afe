"""What a model is for: to generate, to embed or to classify. Free of torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from inferplane.config.engine import ConfigError
from inferplane.models.pooler_config import has_pooling


def task_of(architecture: str) -> str:
    """``generate``, ``embed`` or ``classify``: Hugging Face names classes by their heads."""
    if architecture.endswith("ForSequenceClassification"):
        return "classify"
    is_headless = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    return "embed" if is_headless or architecture.endswith("ForMaskedLM") else "generate"


def tasks_of(architecture: str) -> tuple[str, ...]:
    """All that can be asked of it: two vectors can be compared, and one class is a score."""
    own = task_of(architecture)
    return ("embed", "score") if own == "embed" else ("classify", "score") if own == "classify" else (own,)


def choose_task(asked: str, path: Path, architecture: str, known: Collection[str]) -> tuple[str, str]:
    """The task, and the architecture for it: a decoder that is to embed goes without the head that chooses tokens.

    A decoder beside which sentence-transformers wrote how to pool embeds unless it is asked to generate. Raises
    `ConfigError` for a task that the architecture is not made for.
    """
    own = task_of(architecture)
    wanted = own if asked == "auto" else asked
    if asked == "auto" and own == "generate" and has_pooling(path):
        wanted = "embed"
    if wanted == own:
        return own, architecture
    headless = architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Model"
    if (own, wanted) == ("generate", "embed") and headless in known:
        return wanted, headless
    raise ConfigError(
        "task",
        f"task is {wanted}, but {architecture} is made to {own}: leave task out, or name another model",
    )
