"""FP8 checkpoints: e4m3 weights with one scale, one for each output, or one for each block of 128 × 128."""

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
from inferplane.api.quantized_weight import Activation
from inferplane.models.hf_fields import text
from inferplane.quantization.names import is_among, name_list

SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
MX_SCALES = (torch.float8_e8m0fnu, torch.uint8)
"""Of MXFP8 and MXFP4: powers of two by their exponents, which is what bytes hold."""
RECORDS = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".input_scale", ".output_scale", ".prob_scale")
"""Tensors about activations and the KV cache that a weight can do without."""


class Fp8Format(QuantFormat):
    """``{name}.weight`` in float8_e4m3fn, with ``weight_scale`` or, by block, ``weight_scale_inv``, which both
    multiply. ``activation_scheme`` static adds ``input_scale``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        scheme = text(config, "activation_scheme", "dynamic")
        if scheme not in ("static", "dynamic"):
            raise QuantConfigError(f"activation_scheme should be static or dynamic, but is {scheme!r}")
        if text(config, "fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise QuantConfigError(f"fmt should be e4m3, but is {config['fmt']!r}")
        self._is_static = scheme == "static"
        self._block = block_of(config.get("weight_block_size"))
        self._plain = name_list(config, "ignored_layers", "modules_to_not_convert")

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        if is_among(name, self._plain):
            return None
        if self._block is not None:
            activation = Activation.DYNAMIC_GROUP
            return Fp8Matrix(name, out_features, in_features, self._block, activation, "weight_scale_inv")
        activation = Activation.STATIC_TENSOR if self._is_static else Activation.DYNAMIC_TENSOR
        return Fp8Matrix(name, out_features, in_features, Granularity(None, None), activation, "weight_scale")

    def may_drop(self, name: str, tensor: torch.Tensor) -> bool:
        return name.endswith(RECORDS)


class FbgemmFp8Format(QuantFormat):
    """``{name}.weight`` in float8_e4m3fn and ``weight_scale: [out_features, 1]``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._plain = name_list(config, "modules_to_not_convert")

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        if is_among(name, self._plain):
            return None
        return Fp8Matrix(
            name, out_features, in_features, Granularity(1, None), Activation.DYNAMIC_TOKEN, "weight_scale"
        )

    def may_drop(self, name: str, tensor: torch.Tensor) -> bool:
        return name.endswith((*RECORDS, ".input_scale_ub"))


def block_of(size: Any) -> Granularity | None:
    """``[rows, columns]`` of a configuration."""
    if size is None:
        return None
    is_pair = isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)
    if not is_pair:
        raise QuantConfigError(f"weight_block_size should be two numbers, [rows, columns], but is {size!r}")
    return Granularity(size[0], size[1])


class Fp8Matrix(StoredMatrix):
    """``weight`` and its scale, of any granularity and of one of the types ``scales``; ``input_scale`` with static
    activations."""

    def __init__(
        self,
        name: str,
        out_features: int,
        in_features: int,
        granularity: Granularity,
        activation: Activation,
        scale_name: str,
        scales: tuple[torch.dtype, ...] = SCALES,
    ) -> None:
        super().__init__(name, out_features, in_features)
        self._granularity = granularity
        self._activation = activation
        self._scale_name = scale_name
        self._scales = scales

    def tensors(self) -> Sequence[StoredTensor]:
        shape = self._granularity.scale_shape(self.out_features, self.in_features)
        stored = [
            StoredTensor("weight", (self.out_features, self.in_features), (torch.float8_e4m3fn,)),
            StoredTensor(self._scale_name, shape, self._scales),
        ]
        if self._activation is Activation.STATIC_TENSOR:
            stored.append(StoredTensor("input_scale", (1,), SCALES))
        return stored

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        scale = tensors[self._scale_name]
        if scale.dtype is torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        scheme = QuantScheme(
            Number.FP8_E4M3,
            8,
            self._granularity,
            scale.dtype,
            activation=self._activation,
            activation_number=None if self._activation is Activation.NONE else Number.FP8_E4M3,
        )
        shape = self._granularity.scale_shape(self.out_features, self.in_features)
        input_scale = tensors.get("input_scale")
        return QuantizedWeight(
            scheme,
            self.out_features,
            self.in_features,
            tensors["weight"],
            scale.reshape(shape),
            input_scale=None if input_scale is None else input_scale.float().reshape(()),
        )
