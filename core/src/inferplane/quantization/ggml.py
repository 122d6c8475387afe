"""The block formats of GGUF files: how many values a block holds, and in how many bytes.

A row of a weight is a run of blocks, each with a scale of its own. What blocks mean is in
`inferplane.quantization.gguf`; this is all that reading a file needs, which is done without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferplane.models.errors import ModelLoadError

Bytes = NDArray[np.uint8]
_K = 256

METHOD = "gguf"
"""``quant_method`` of the configuration that a file with packed tensors stands for."""
TENSOR_TYPES = "tensor_types"
"""Its field: the format of each packed matrix by the matrix's name, as in ``{"lm_head": "Q6_K"}``."""


@dataclass(frozen=True)
class BlockFormat:
    """How a tensor's values lie in a file."""

    name: str
    type_id: int
    """The number that GGUF files write."""
    block_size: int
    """Values per block."""
    bytes_per_block: int

    @property
    def is_packed(self) -> bool:
        """False where a block is one plain number, which needs no dequantization."""
        return self.block_size > 1

    def row_bytes(self, num_values: int) -> int:
        """Bytes of a row. Raises ValueError unless ``num_values`` is a whole number of blocks."""
        num_blocks, rest = divmod(num_values, self.block_size)
        if rest:
            raise ValueError(
                f"a row of {num_values} values is no whole number of {self.name} blocks of {self.block_size}"
            )
        return num_blocks * self.bytes_per_block


FORMATS = {
    block_format.type_id: block_format
    for block_format in (
        BlockFormat("F32", 0, 1, 4),
        BlockFormat("F16", 1, 1, 2),
        BlockFormat("Q4_0", 2, 32, 18),
        BlockFormat("Q4_1", 3, 32, 20),
        BlockFormat("Q5_0", 6, 32, 22),
        BlockFormat("Q5_1", 7, 32, 24),
        BlockFormat("Q8_0", 8, 32, 34),
        BlockFormat("Q2_K", 10, _K, 84),
        BlockFormat("Q3_K", 11, _K, 110),
        BlockFormat("Q4_K", 12, _K, 144),
        BlockFormat("Q5_K", 13, _K, 176),
        BlockFormat("Q6_K", 14, _K, 210),
        BlockFormat("IQ2_XXS", 16, _K, 66),
        BlockFormat("IQ2_XS", 17, _K, 74),
        BlockFormat("IQ3_XXS", 18, _K, 98),
        BlockFormat("IQ1_S", 19, _K, 50),
        BlockFormat("IQ4_NL", 20, 32, 18),
        BlockFormat("IQ3_S", 21, _K, 110),
        BlockFormat("IQ2_S", 22, _K, 82),
        BlockFormat("IQ4_XS", 23, _K, 136),
        BlockFormat("IQ1_M", 29, _K, 56),
        BlockFormat("BF16", 30, 1, 2),
        BlockFormat("TQ1_0", 34, _K, 54),
        BlockFormat("TQ2_0", 35, _K, 66),
        BlockFormat("MXFP4", 39, 32, 17),
        BlockFormat("NVFP4", 40, 64, 36),
    )
}
"""By the number that GGUF files write."""

# Only so that a refusal can name what the file holds.
_NAMES_OF_OTHERS = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0",
}  # fmt: skip


def block_format(type_id: int, tensor: str) -> BlockFormat:
    """The format with this number. Raises `ModelLoadError` naming ``tensor``, the type and those that are known."""
    found = FORMATS.get(type_id)
    if found is None:
        name = _NAMES_OF_OTHERS.get(type_id, "unknown")
        known = ", ".join(known.name for known in FORMATS.values())
        raise ModelLoadError(
            f"tensor {tensor!r} is of type {name} ({type_id}), which cannot be read; known types: {known}"
        )
    return found
