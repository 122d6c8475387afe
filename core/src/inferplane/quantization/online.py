"""Quantizing a plain checkpoint while it is loaded: a scale for each output, activations by the token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from inferplane.api.quant import PLAIN_DTYPES, QuantFormat, StoredMatrix, StoredTensor
from inferplane.api.quantized_weight import QuantizedWeight, QuantScheme
from inferplane.quantization.rounding import FP8_CHANNEL, INT8_CHANNEL, round_to

LEAST_FEATURES = 16
"""A smaller matrix is a gate, which costs nothing and errs dearly."""


class _Online(QuantFormat):
    scheme: ClassVar[QuantScheme]

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        if min(out_features, in_features) < LEAST_FEATURES:
            return None
        return PlainMatrix(name, out_features, in_features, self.scheme)


class OnlineFp8(_Online):
    scheme = FP8_CHANNEL


class OnlineInt8(_Online):
    scheme = INT8_CHANNEL


class PlainMatrix(StoredMatrix):
    """``weight`` as it always was; rounded when it is read."""

    def __init__(self, name: str, out_features: int, in_features: int, scheme: QuantScheme) -> None:
        super().__init__(name, out_features, in_features)
        self._scheme = scheme

    def tensors(self) -> Sequence[StoredTensor]:
        return [StoredTensor("weight", (self.out_features, self.in_features), PLAIN_DTYPES)]

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        return round_to(tensors["weight"], self._scheme)
