"""GGUF files: each tensor of a block format of its own, which becomes whole numbers with scales and offsets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from inferplane.api.quant import (
    Granularity,
    QuantConfigError,
    QuantFormat,
    QuantizedWeight,
    QuantScheme,
    StoredMatrix,
    StoredTensor,
)
from inferplane.quantization import ggml_blocks, ggml_codebooks
from inferplane.quantization.ggml import FORMATS, TENSOR_TYPES, BlockFormat

_READERS = {**ggml_blocks.READERS, **ggml_codebooks.READERS}
"""By the type's name; every packed one of `inferplane.quantization.ggml.FORMATS`."""


class GgufFormat(QuantFormat):
    """``{name}.weight`` as rows of blocks. The configuration is the loader's own and names the format of each."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        known = {each.name: each for each in FORMATS.values() if each.is_packed}
        types = config.get(TENSOR_TYPES)
        if not isinstance(types, Mapping):
            raise QuantConfigError(f"{TENSOR_TYPES} should be a table of types by matrix, but is {types!r}")
        for name, found in types.items():
            if found not in known:
                raise QuantConfigError(
                    f"{TENSOR_TYPES}: {name} is of {found!r}, which is none of {', '.join(known)}"
                )
        self._formats = {name: known[found] for name, found in types.items()}

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        block_format = self._formats.get(name)
        if block_format is None:
            return None
        return _BlockMatrix(name, out_features, in_features, block_format)

    def vocabulary(self, name: str, vocab_size: int, size: int) -> StoredMatrix | None:
        return self.matrix(name, vocab_size, size)


class _BlockMatrix(StoredMatrix):
    def __init__(self, name: str, out_features: int, in_features: int, block_format: BlockFormat) -> None:
        super().__init__(name, out_features, in_features)
        self._format = block_format
        try:
            self._row_bytes = block_format.row_bytes(in_features)
        except ValueError as error:
            raise self.fail(str(error)) from error

    def tensors(self) -> Sequence[StoredTensor]:
        return [StoredTensor("weight", (self.out_features, self._row_bytes), (torch.uint8,))]

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        blocks = tensors["weight"].unflatten(1, (-1, self._format.bytes_per_block))
        parts = _READERS[self._format.name](blocks)
        scale = parts.scale.flatten(1)
        has_offset = parts.offset is not None
        scheme = QuantScheme(
            parts.number,
            parts.bits,
            Granularity(1, self.in_features // scale.shape[1]),
            scale.dtype,
            is_symmetric=not has_offset,
            has_offset=has_offset,
        )
        # formats with an offset count from 0, our codes from the middle
        lowest = torch.tensor(-(2 ** (parts.bits - 1)), dtype=torch.int8, device=scale.device)
        return QuantizedWeight(
            scheme,
            self.out_features,
            self.in_features,
            parts.codes.flatten(1),
            scale,
            lowest.expand(scale.shape) if has_offset else None,
            table=parts.table,
            offset=None if parts.offset is None else parts.offset.flatten(1),
        )
