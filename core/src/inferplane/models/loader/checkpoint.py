"""`Checkpoint`: what every kind of stored model can be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Checkpoint(Protocol):
    """A stored model. Opening one reads headers and configuration only and imports no torch; `tensors` does.

    Everything raises `ModelLoadError` that names the file and the field or tensor at fault.
    """

    @property
    def hf_config(self) -> dict[str, Any]:
        """``config.json``; for other containers, the one that they stand for."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """``generation_config.json``, empty where there is none."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template."""
        ...

    def tensor_names(self) -> tuple[str, ...]:
        """Hugging Face names, in the order in which `tensors` yields them."""
        ...

    def tensors(self, progress: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by its Hugging Face name, each read when its turn comes.

        Tensors may be views of the mapped file: take what is needed (a shard, another dtype) and let go. Packed
        ones arrive as they are stored, which ``quantization_config`` explains. ``progress`` shows a bar on stderr.
        """
        ...
