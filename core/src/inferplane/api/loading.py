"""How models and their weights reach this machine, for the hooks ``model_sources`` and ``weight_loaders``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from inferplane.models.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

__all__ = ["ModelFetcher", "ModelLoadError", "WeightLoader"]


class ModelFetcher(Protocol):
    """Brings a model to this machine."""

    def __call__(self, uri: str, *, revision: str | None, progress: bool) -> Path:
        """The folder (with ``config.json``) or GGUF file that ``uri``, scheme included, stands for.

        What is here already is not fetched again. ``progress`` shows bars on stderr. Imports no torch. Raises
        `ModelLoadError` that names the URI and says what to do.
        """
        ...


class WeightLoader(Protocol):
    """Reads the tensors of a model."""

    def __call__(self, path: Path) -> Iterable[tuple[str, torch.Tensor]]:
        """Every tensor of the model at ``path`` by its Hugging Face name, in host memory, read when its turn comes.

        Called on every rank. Raises `ModelLoadError` that names the file.
        """
        ...
