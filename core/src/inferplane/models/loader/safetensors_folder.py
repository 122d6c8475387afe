"""`SafetensorsFolder`: a checkpoint as Hugging Face repositories lay it out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.models.errors import ModelLoadError
from inferplane.models.json_file import read_json_table, read_optional_json_table
from inferplane.models.loader.progress import with_progress
from inferplane.models.loader.safetensors_file import SafetensorsFile
from inferplane.models.source import PICKLE_SUFFIXES
from inferplane.tokenizer.template_files import default_template_of_folder

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class SafetensorsFolder:
    """A `Checkpoint`. Headers of all shards are checked against the index when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hf_config = read_json_table(path / "config.json")
        self._file_of_tensor = self._with_index() if (path / INDEX).is_file() else self._without_index()

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        return read_optional_json_table(self.path / "generation_config.json")

    @cached_property
    def chat_template(self) -> str | None:
        return default_template_of_folder(self.path)

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._file_of_tensor)

    def tensors(self, progress: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        files = self._file_of_tensor
        total = sum(file.places[name].num_bytes for name, file in files.items())
        pairs = ((file.places[name].num_bytes, (name, file.tensor(name))) for name, file in files.items())
        return with_progress(pairs, total, show=progress)

    def _with_index(self) -> dict[str, SafetensorsFile]:
        index_path = self.path / INDEX
        shard_of_tensor = read_json_table(index_path).get("weight_map")
        if not isinstance(shard_of_tensor, dict) or not all(map(_is_file_name, shard_of_tensor.values())):
            raise ModelLoadError(
                f"{index_path}: weight_map should name a file of this folder for each tensor"
            )
        shards = {name: self._open_shard(name, index_path) for name in sorted(set(shard_of_tensor.values()))}
        for tensor, shard in shard_of_tensor.items():
            if tensor not in shards[shard].places:
                raise ModelLoadError(
                    f"{index_path}: places tensor {tensor!r} in {shard}, which does not hold it"
                )
        for name, file in shards.items():
            for tensor in file.places:
                if shard_of_tensor.get(tensor) != name:
                    raise ModelLoadError(
                        f"{file.path}: holds tensor {tensor!r}, which {INDEX} does not place there"
                    )
        return {tensor: file for file in shards.values() for tensor in file.places}

    def _open_shard(self, name: str, index_path: Path) -> SafetensorsFile:
        if not (self.path / name).is_file():
            raise ModelLoadError(
                f"{self.path / name}: is missing, but {index_path.name} names it: fetch it again"
            )
        return SafetensorsFile(self.path / name)

    def _without_index(self) -> dict[str, SafetensorsFile]:
        files = (
            [self.path / SINGLE]
            if (self.path / SINGLE).is_file()
            else sorted(self.path.glob("*.safetensors"))
        )
        if not files:
            raise ModelLoadError(_why_there_are_no_weights(self.path))
        found: dict[str, SafetensorsFile] = {}
        for file in map(SafetensorsFile, files):
            for tensor in file.places:
                if tensor in found:
                    raise ModelLoadError(
                        f"{self.path}: both {found[tensor].path.name} and {file.path.name} hold tensor {tensor!r}, "
                        f"and no {INDEX} says which one counts"
                    )
                found[tensor] = file
        return found


def _is_file_name(name: object) -> bool:
    """Anything but a plain name could lead out of the folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def _why_there_are_no_weights(path: Path) -> str:
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{path}: has its weights as pickles ({', '.join(pickles[:3])}), which can run code when they are loaded; "
            "only safetensors and GGUF are read: convert them with safetensors' convert.py or "
            "save_pretrained(safe_serialization=True) where you trust them"
        )
    return f"{path}: has no {SINGLE}, {INDEX} or other .safetensors file"
