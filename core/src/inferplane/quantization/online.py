"""Quantizing a plain checkpoint while it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from inferplane.api.quant import PLAIN_DTYPES, QuantFormat, StoredMatrix, StoredTensor
from inferplane.api.quantized_weight import QuantizedWeight, QuantScheme
from inferplane.quantization.rounding import (
    FP8_CHANNEL,
    INT4_GROUPS,
    INT8_CHANNEL,
    MXFP4,
    round_to,
    with_columns,
)

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
    """A scale for each output, activations by the token; as `OnlineInt8`."""

    scheme = FP8_CHANNEL


class OnlineInt8(_Online):
    scheme = INT8_CHANNEL


class _OnlineGroups(_Online):
    """Weights alone, with a scale for each group of columns. A matrix that no group size divides stays plain."""

    group_sizes: ClassVar[Sequence[int]]

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        size = next((each for each in self.group_sizes if in_features % each == 0), None)
        if size is None or min(out_features, in_features) < LEAST_FEATURES:
            return None
        return PlainMatrix(name, out_features, in_features, with_columns(self.scheme, size))


class OnlineInt4(_OnlineGroups):
    scheme = INT4_GROUPS
    group_sizes = (128, 64, 32)


class OnlineMxfp4(_OnlineGroups):
    scheme = MXFP4
    group_sizes = (32,)


class PlainMatrix(StoredMatrix):
    """``weight`` as it always was; rounded when it is read."""

    def __init__(self, name: str, out_features: int, in_features: int, scheme: QuantScheme) -> None:
        super().__init__(name, out_features, in_features)
        self._scheme = scheme

    def tensors(self) -> Sequence[StoredTensor]:
        return [StoredTensor("weight", (self.out_features, self.in_features), PLAIN_DTYPES)]

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        return round_to(tensors["weight"], self._scheme)
