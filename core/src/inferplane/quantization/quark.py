"""The format of the Quark library: one scheme for all layers, and others for layers by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from inferplane.api.quantized_weight import CHANNEL, TENSOR, Activation
from inferplane.models.hf_fields import flag, text
from inferplane.quantization.bits import unpack_words
from inferplane.quantization.fp8 import RECORDS, SCALES, Fp8Matrix
from inferplane.quantization.integers import centred_codes, centred_zero, check_words, in_plain_order
from inferplane.quantization.mxfp4 import Fp4Matrix
from inferplane.quantization.names import is_among, name_list, with_stars

_READ = (
    "fp8_e4m3 and int8 per_tensor or per_channel, int4 and uint4 per_group, and fp4 per_group of 32 in e8m0"
)


@dataclass(frozen=True)
class _Layer:
    dtype: str
    granularity: Granularity
    is_symmetric: bool
    activation: Activation
    activation_number: Number | None

    @property
    def needs_zero(self) -> bool:
        """Symmetric codes with a sign are around 0; of others only the zero point says around what."""
        return not self.is_symmetric or self.dtype == "uint4"


class QuarkFormat(QuantFormat):
    """``{name}.weight``, ``weight_scale`` and, of integers, ``weight_zero_point``, which those of symmetric schemes may
    have, too."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        export = config.get("export") or {}
        weight_format = text(export, "weight_format", "real_quantized")
        if weight_format != "real_quantized":
            raise QuantConfigError(f"export.weight_format {weight_format!r} is not read; real_quantized is")
        pack_method = text(export, "pack_method", "reorder")
        if pack_method not in ("reorder", "order"):
            raise QuantConfigError(f"export.pack_method {pack_method!r} is not read; reorder and order are")
        self._is_reordered = pack_method == "reorder"
        if config.get("layer_type_quant_config"):
            raise QuantConfigError("layer_type_quant_config: settings by type of layer are not read")
        self._of_all = _read_layer("global_quant_config", config.get("global_quant_config"))
        by_name = config.get("layer_quant_config") or {}
        if not isinstance(by_name, Mapping):
            raise QuantConfigError(f"layer_quant_config should be a table by layer, but is {by_name!r}")
        self._by_name = {
            with_stars(name): _read_layer(f"layer_quant_config.{name}", layer)
            for name, layer in by_name.items()
        }
        self._plain = [with_stars(name) for name in name_list(config, "exclude")]

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        if is_among(name, self._plain):
            return None
        named = (layer for pattern, layer in self._by_name.items() if is_among(name, [pattern]))
        layer = next(named, self._of_all)
        if layer is None:
            return None
        if layer.dtype == "fp4":
            return Fp4Matrix(name, out_features, in_features, "weight", "weight_scale", global_name=None)
        if layer.dtype == "fp8_e4m3":
            return Fp8Matrix(
                name, out_features, in_features, layer.granularity, layer.activation, "weight_scale"
            )
        if layer.dtype == "int8":
            return _Int8Matrix(name, out_features, in_features, layer)
        return _Int4Matrix(name, out_features, in_features, layer, self._is_reordered)

    def may_drop(self, name: str, tensor: torch.Tensor) -> bool:
        return name.endswith((*RECORDS, ".input_zero_point", ".output_zero_point"))


def _read_layer(where: str, config: Any) -> _Layer | None:
    """None of layers that stay plain."""
    if not isinstance(config, Mapping):
        raise QuantConfigError(f"{where} should be a table with weight, but is {config!r}")
    weight = config.get("weight")
    if weight is None:
        return None
    if not isinstance(weight, Mapping):
        raise QuantConfigError(f"{where}.weight should be one table, but is {weight!r}")
    dtype, granularity = text(weight, "dtype", ""), _granularity(weight)
    by_group = granularity is not None and granularity.columns is not None
    is_read = granularity is not None and {
        "fp8_e4m3": not by_group,
        "int8": not by_group,
        "int4": by_group,
        "uint4": by_group,
        "fp4": granularity == Granularity(1, 32) and weight.get("scale_format") == "e8m0",
    }.get(dtype, False)
    if granularity is None or not is_read or weight.get("zero_point_type") == "float32":
        raise QuantConfigError(
            f"{where}.weight: {dtype} {weight.get('qscheme')} with group_size {weight.get('group_size')}, scale_format "
            f"{weight.get('scale_format')} and zero_point_type {weight.get('zero_point_type')} is not read; {_READ} are"
        )
    return _Layer(
        dtype,
        granularity,
        flag(weight, "symmetric", False),
        *_activation(where, config.get("input_tensors")),
    )


def _granularity(weight: Mapping[str, Any]) -> Granularity | None:
    axis, group_size = weight.get("ch_axis"), weight.get("group_size")
    match weight.get("qscheme"):
        case "per_tensor":
            return TENSOR
        case "per_channel" if axis in (0, None):
            return CHANNEL
        case "per_group" if axis in (1, -1) and isinstance(group_size, int) and group_size > 1:
            return Granularity(1, group_size)
    return None


def _activation(where: str, config: Any) -> tuple[Activation, Number | None]:
    if config is None:
        return Activation.NONE, None
    if not isinstance(config, Mapping):
        raise QuantConfigError(f"{where}.input_tensors should be one table, but is {config!r}")
    numbers = {"fp8_e4m3": Number.FP8_E4M3, "int8": Number.INT, "uint8": Number.INT, "fp4": Number.FP4}
    number = numbers.get(text(config, "dtype", ""))
    if not flag(config, "is_dynamic", False):
        return Activation.STATIC_TENSOR, number
    kinds = {"per_tensor": Activation.DYNAMIC_TENSOR, "per_group": Activation.DYNAMIC_GROUP}
    return kinds.get(text(config, "qscheme", ""), Activation.DYNAMIC_TOKEN), number


def _weight(
    matrix: StoredMatrix,
    layer: _Layer,
    bits: int,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    input_scale: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Of whole numbers; symmetric where the configuration says so and no zero point is another than 0."""
    is_symmetric = zero is None or (layer.is_symmetric and (zero.is_meta or not bool(zero.any())))
    scheme = QuantScheme(
        Number.INT, bits, layer.granularity, scale.dtype, is_symmetric=is_symmetric, activation=layer.activation,
        activation_number=layer.activation_number,
    )  # fmt: skip
    return QuantizedWeight(
        scheme, matrix.out_features, matrix.in_features, codes, scale, None if is_symmetric else zero,
        input_scale=input_scale,
    )  # fmt: skip


class _Int8Matrix(StoredMatrix):
    """``weight: [out, in]`` int8."""

    def __init__(self, name: str, out_features: int, in_features: int, layer: _Layer) -> None:
        super().__init__(name, out_features, in_features)
        self._layer = layer
        self._shape = layer.granularity.scale_shape(out_features, in_features)

    def tensors(self) -> Sequence[StoredTensor]:
        stored = [
            StoredTensor("weight", (self.out_features, self.in_features), (torch.int8,)),
            StoredTensor("weight_scale", self._shape, SCALES),
            StoredTensor("weight_zero_point", self._shape, (torch.int8, torch.int32), self._layer.needs_zero),
        ]
        if self._layer.activation is Activation.STATIC_TENSOR:
            stored.append(StoredTensor("input_scale", (1,), SCALES))
        return stored

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        zero = tensors.get("weight_zero_point")
        if zero is not None:
            zero = zero.reshape(self._shape).to(torch.int8)
        scale, input_scale = tensors["weight_scale"].reshape(self._shape), tensors.get("input_scale")
        if input_scale is not None:
            input_scale = input_scale.float().reshape(())
        return _weight(self, self._layer, 8, tensors["weight"], scale, zero, input_scale)


class _Int4Matrix(StoredMatrix):
    """``weight: [in, out / 8]`` words, as AWQ has them; of int4 each code in two's complement."""

    def __init__(
        self, name: str, out_features: int, in_features: int, layer: _Layer, is_reordered: bool
    ) -> None:
        super().__init__(name, out_features, in_features)
        self._layer = layer
        self._is_reordered = is_reordered
        self._num_groups = layer.granularity.scale_shape(out_features, in_features)[1]
        self.check_groups(layer.granularity.columns)
        check_words(self)

    def tensors(self) -> Sequence[StoredTensor]:
        words = self.out_features // 8
        return [
            StoredTensor("weight", (self.in_features, words), (torch.int32,)),
            StoredTensor("weight_scale", (self._num_groups, self.out_features), SCALES),
            StoredTensor(
                "weight_zero_point", (self._num_groups, words), (torch.int32,), self._layer.needs_zero
            ),
        ]

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        scale = tensors["weight_scale"].T.contiguous()
        zero = tensors.get("weight_zero_point")
        if zero is not None:
            zero = centred_zero(self._codes(zero), 4)
        return _weight(self, self._layer, 4, centred_codes(self._codes(tensors["weight"]), 4), scale, zero)

    def _codes(self, words: torch.Tensor) -> torch.Tensor:
        """``[n, out / 8]`` words as ``[out, n]`` codes from 0 up."""
        codes = unpack_words(words, 4, self.out_features)
        if self._is_reordered:
            codes = in_plain_order(codes)
        return codes.T ^ 8 if self._layer.dtype == "int4" else codes.T
