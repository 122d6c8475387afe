"""What can be asked of a model that pools, and the texts that it is asked about. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from inferplane.config import PoolerConfig
from inferplane.engine.errors import TaskError
from inferplane.request import ParameterError, PoolingParams


def check_pooling(pooler: PoolerConfig | None, params: PoolingParams) -> None:
    """``pooler`` is None of a model that generates.

    Raises `TaskError` where the model is not made for the task, `ParameterError` for dimensions that it does not have.
    """
    if pooler is None or params.task not in pooler.tasks:
        raise TaskError(params.task, ("generate",) if pooler is None else pooler.tasks)
    asked, size = params.dimensions, pooler.max_dimensions
    if asked is None or asked == size:
        return
    if pooler.dimensions == ():
        raise ParameterError(
            "dimensions",
            f"dimensions is {asked}, but the model's vectors have {size or len(pooler.labels)} numbers, and its "
            "config.json does not say that they can be cut (is_matryoshka, matryoshka_dimensions)",
        )
    if asked > size or (pooler.dimensions is not None and asked not in pooler.dimensions):
        choices = f"1 to {size}" if pooler.dimensions is None else ", ".join(map(str, pooler.dimensions))
        raise ParameterError("dimensions", f"dimensions is {asked}, but the model has {choices}")


def leading_text(pooler: PoolerConfig | None, prompt_name: str | None) -> str:
    """What the model wants before each text to embed. Raises `ParameterError` for a name that it does not have."""
    if pooler is None or prompt_name is None:
        return "" if pooler is None else pooler.default_prompt
    if prompt_name not in pooler.prompts:
        known = ", ".join(pooler.prompts) or "none"
        raise ParameterError("prompt_name", f"prompt_name {prompt_name!r} is unknown; the model has {known}")
    return pooler.prompts[prompt_name]


def text_pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """One query with each document, or each with its own. Raises `ValueError` where their numbers do not fit."""
    several = [documents] if isinstance(documents, str) else list(documents)
    asked = [queries] if isinstance(queries, str) else list(queries)
    if len(asked) == 1:
        asked *= len(several)
    if len(asked) != len(several) or not several:
        raise ValueError(
            f"there are {len(asked)} queries and {len(several)} documents: give one query, or one for each document"
        )
    return list(zip(asked, several))
