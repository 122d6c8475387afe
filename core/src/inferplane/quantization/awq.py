"""AWQ (arXiv:2306.00978) in its gemm layout: 4 bits, eight outputs to a word in the order 0 2 4 6 1 3 5 7."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from inferplane.api.quant import (
    Granularity,
    Number,
    QuantConfigError,
    QuantFormat,
    QuantizedWeight,
    QuantScheme,
    StoredMatrix,
    StoredTensor,
)
from inferplane.models.hf_fields import flag, text
from inferplane.quantization.bits import unpack_words
from inferplane.quantization.integers import centred_codes, centred_zero, check_words, in_plain_order
from inferplane.quantization.names import is_among, name_list

_BITS = 4
_HALF = (torch.float16, torch.bfloat16, torch.float32)


class AwqFormat(QuantFormat):
    """``{name}.qweight``, ``scales`` and, with ``zero_point``, ``qzeros``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits = config.get("bits", config.get("w_bit"))
        if bits != _BITS:
            raise QuantConfigError(f"bits should be 4, but is {bits!r}")
        layout = text(config, "version", "gemm").lower()
        if layout != "gemm":
            raise QuantConfigError(
                f"version {layout!r} lays weights out in an order that is not read; gemm is"
            )
        self._group_size = config.get("group_size", config.get("q_group_size"))
        if not isinstance(self._group_size, int) or (self._group_size != -1 and self._group_size < 2):
            raise QuantConfigError(
                f"group_size should be -1 or a number of columns, but is {self._group_size!r}"
            )
        self._has_zero = flag(config, "zero_point", True)
        self._plain = name_list(config, "modules_to_not_convert")

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        if is_among(name, self._plain):
            return None
        group_size = in_features if self._group_size == -1 else self._group_size
        return _AwqMatrix(name, out_features, in_features, group_size, self._has_zero)


class _AwqMatrix(StoredMatrix):
    def __init__(
        self, name: str, out_features: int, in_features: int, group_size: int, has_zero: bool
    ) -> None:
        super().__init__(name, out_features, in_features)
        self._group_size = group_size
        self._has_zero = has_zero
        check_words(self)
        self.check_groups(group_size)

    def tensors(self) -> Sequence[StoredTensor]:
        groups, words = self.in_features // self._group_size, self.out_features // 8
        zeros = [StoredTensor("qzeros", (groups, words), (torch.int32,))] if self._has_zero else []
        return [
            StoredTensor("qweight", (self.in_features, words), (torch.int32,)),
            *zeros,
            StoredTensor("scales", (groups, self.out_features), _HALF),
        ]

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        scale = tensors["scales"].T.contiguous()
        scheme = QuantScheme(
            Number.INT,
            _BITS,
            Granularity(1, None if self._group_size == self.in_features else self._group_size),
            scale.dtype,
            is_symmetric=not self._has_zero,
        )
        return QuantizedWeight(
            scheme,
            self.out_features,
            self.in_features,
            centred_codes(self._in_order(tensors["qweight"]), _BITS),
            scale,
            centred_zero(self._in_order(tensors["qzeros"]), _BITS) if self._has_zero else None,
        )

    def _in_order(self, words: torch.Tensor) -> torch.Tensor:
        """``[n, out / 8]`` words as ``[out, n]`` codes."""
        return in_plain_order(unpack_words(words, _BITS, self.out_features)).T
