"""`GGUFFile`: a checkpoint in one GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.models.errors import ModelLoadError
from inferplane.models.loader.gguf_config import architecture_of, generation_config, hf_config
from inferplane.models.loader.gguf_names import ROPE_TENSORS, restore_row_order
from inferplane.models.loader.gguf_reader import GGUFReader, TensorEntry
from inferplane.models.loader.lookahead import map_ahead
from inferplane.models.loader.progress import with_progress
from inferplane.quantization.ggml import METHOD, TENSOR_TYPES, Bytes

if TYPE_CHECKING:
    import torch


class GGUFFile:
    """A `Checkpoint`. Names, row order and configuration are those of the Hugging Face checkpoint it was made from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = GGUFReader(path)
        metadata = self.reader.metadata
        num_files = metadata.optional_integer("split.count") or 1
        if num_files > 1:
            raise ModelLoadError(
                f"{path}: is one of {num_files} files of a model; join them first (llama-gguf-split --merge)"
            )
        self._architecture = architecture_of(metadata)
        self._entries = self._by_hf_name()
        self._check_layers()

    @cached_property
    def hf_config(self) -> dict[str, Any]:
        config = hf_config(self.reader)
        types = {
            name.removesuffix(".weight"): entry.block_format.name
            for name, entry in self._entries.items()
            if entry.block_format.is_packed
        }
        if not types:
            return config
        return {**config, "quantization_config": {"quant_method": METHOD, TENSOR_TYPES: types}}

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        return generation_config(self.reader.metadata)

    @property
    def chat_template(self) -> str | None:
        return self.reader.metadata.optional_text("tokenizer.chat_template")

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def tensors(self, progress: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        total = sum(entry.num_bytes for entry in self._entries.values())
        pairs = map_ahead(self._with_size, self._entries.items())
        return with_progress(pairs, total, show=progress)

    def _by_hf_name(self) -> dict[str, TensorEntry]:
        found: dict[str, TensorEntry] = {}
        for name, entry in self.reader.entries.items():
            if name in ROPE_TENSORS:
                continue
            hf_name = self._architecture.hf_name(name)
            if hf_name is None:
                raise ModelLoadError(
                    f"{self.path}: tensor {name!r} is none that a {self._architecture.model_type} model has"
                )
            found[hf_name] = entry
        return found

    def _check_layers(self) -> None:
        """A wrong count would otherwise leave layers out, or make a model of a billion layers first."""
        num_layers = self.hf_config["num_hidden_layers"]
        layers = {int(name.split(".")[2]) for name in self._entries if name.startswith("model.layers.")}
        if layers != set(range(len(layers))) or len(layers) != num_layers:
            missing = sorted(set(range(min(num_layers, 1_000_000))) - layers)[:3]
            raise ModelLoadError(
                f"{self.path}: block_count is {num_layers}, but the file has tensors of {len(layers)} layers"
                + (f"; missing: {', '.join(map(str, missing))}, …" if missing else "")
            )

    def _with_size(self, item: tuple[str, TensorEntry]) -> tuple[int, tuple[str, torch.Tensor]]:
        name, entry = item
        return entry.num_bytes, (name, self._tensor(entry))

    def _tensor(self, entry: TensorEntry) -> torch.Tensor:
        import torch

        data = self.reader.data(entry)
        if self._architecture.is_reordered(entry.name):
            # a bias has one number per row
            data = restore_row_order(data.reshape(entry.shape[0], -1), self._heads(entry)).reshape(data.shape)
        if entry.block_format.is_packed:
            return torch.from_numpy(_contiguous(data))
        if self._architecture.norm_offset and self._architecture.is_norm(entry.name):
            return torch.from_numpy(_contiguous(data)).view(torch.float32) - self._architecture.norm_offset
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[entry.block_format.name]
        return torch.from_numpy(_contiguous(data)).view(dtype).reshape(entry.shape)

    def _heads(self, entry: TensorEntry) -> int:
        key = "num_attention_heads" if ".attn_q." in entry.name else "num_key_value_heads"
        num_heads = self.hf_config[key]
        num_rows = entry.shape[0]
        if num_rows % (2 * num_heads):
            raise ModelLoadError(
                f"{self.path}: tensor {entry.name!r} has {num_rows} rows, which are no {num_heads} heads"
            )
        return num_heads


def _contiguous(data: Bytes) -> Bytes:
    return data if data.flags.c_contiguous else data.copy()
