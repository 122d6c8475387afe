"""`ConfigFolder`: a model of which only the configuration is wanted, because its weights are drawn at random."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.models.errors import ModelLoadError
from inferplane.models.json_file import read_json_table, read_optional_json_table
from inferplane.tokenizer.template_files import default_template_of_folder

if TYPE_CHECKING:
    import torch


class ConfigFolder:
    """A `Checkpoint` without tensors, whether the folder has some or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hf_config = read_json_table(path / "config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        return read_optional_json_table(self.path / "generation_config.json")

    @cached_property
    def chat_template(self) -> str | None:
        return default_template_of_folder(self.path)

    def tensor_names(self) -> tuple[str, ...]:
        return ()

    def tensors(self, progress: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        raise ModelLoadError(f"{self.path}: was opened without its weights, as load_format dummy asks")
