"""The format of the compressed-tensors library: groups of layers, each with its own scheme."""

from __future__ import annotations

import logging
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
from inferplane.api.quantized_weight import Activation
from inferplane.models.hf_fields import flag, text, whole_number
from inferplane.quantization.bits import num_words, unpack_words
from inferplane.quantization.fp8 import MX_SCALES, RECORDS, SCALES, Fp8Matrix, block_of
from inferplane.quantization.integers import centred_codes, centred_zero
from inferplane.quantization.mxfp4 import Fp4Matrix
from inferplane.quantization.names import is_among, name_list

logger = logging.getLogger(__name__)

_LAYOUTS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized",
    "nvfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip


@dataclass(frozen=True)
class _Group:
    targets: Sequence[str]
    layout: str
    number: Number
    bits: int
    is_symmetric: bool
    granularity: Granularity
    has_order: bool
    activation: Activation
    activation_number: Number | None


class CompressedTensorsFormat(QuantFormat):
    """``{name}.weight`` (or, packed into 32-bit words, ``weight_packed``), ``weight_scale``, ``weight_zero_point``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        sparsity = config.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            raise QuantConfigError(
                f"sparsity_config.format is {sparsity['format']!r}: weights that are stored as sparse are not read"
            )
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise QuantConfigError(f"config_groups should be a table of schemes, but is {groups!r}")
        layout = text(config, "format", "naive-quantized")
        self._groups = [_read_group(f"config_groups.{key}", each, layout) for key, each in groups.items()]
        self._ignored = name_list(config, "ignore")
        if config.get("kv_cache_scheme"):
            logger.info(
                "the checkpoint was made for a quantized KV cache; --kv-cache-dtype fp8_e4m3 stores keys and values so"
            )

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        if is_among(name, self._ignored):
            return None
        group = next((each for each in self._groups if _is_target(name, each.targets)), None)
        if group is None:
            return None
        if group.layout in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
            return Fp4Matrix(
                name, out_features, in_features, "weight_packed", "weight_scale",
                global_name="weight_global_scale" if group.layout.startswith("nvfp4") else None,
                divides_by_global=True,
            )  # fmt: skip
        if group.number is Number.FP8_E4M3:
            return Fp8Matrix(
                name, out_features, in_features, group.granularity, group.activation, "weight_scale",
                MX_SCALES if group.layout == "mxfp8-quantized" else SCALES,
            )  # fmt: skip
        return _IntMatrix(name, out_features, in_features, group)

    def may_drop(self, name: str, tensor: torch.Tensor) -> bool:
        return name.endswith((*RECORDS, ".input_zero_point", ".input_global_scale"))


def _is_target(name: str, targets: Sequence[str]) -> bool:
    return "Linear" in targets or is_among(name, targets)


def _read_group(where: str, config: Any, layout: str) -> _Group:
    weights = config.get("weights") if isinstance(config, Mapping) else None
    if not isinstance(weights, Mapping):
        raise QuantConfigError(f"{where} should be a table with weights, but is {config!r}")
    layout = text(config, "format", layout)
    if layout not in _LAYOUTS:
        raise QuantConfigError(f"{where}: format {layout!r} is not read; there are {', '.join(_LAYOUTS)}")
    number, bits = _number(f"{where}.weights", weights)
    activation, activation_number = _activation(where, config.get("input_activations"))
    if number is Number.INT and layout not in ("pack-quantized", "int-quantized", "naive-quantized"):
        raise QuantConfigError(f"{where}: format {layout!r} is for floating-point weights, not int{bits}")
    return _Group(
        targets=name_list(config, "targets"),
        layout=layout,
        number=number,
        bits=bits,
        is_symmetric=flag(weights, "symmetric", True),
        granularity=_granularity(f"{where}.weights", weights),
        has_order=weights.get("actorder") in ("group", True),
        activation=activation,
        activation_number=activation_number,
    )


def _number(where: str, config: Mapping[str, Any]) -> tuple[Number, int]:
    kind, bits = text(config, "type", "int"), whole_number(config, "num_bits", 8)
    if kind == "int" and bits in (2, 3, 4, 8):
        return Number.INT, bits
    if kind == "float" and bits in (4, 8):
        return (Number.FP8_E4M3 if bits == 8 else Number.FP4), bits
    raise QuantConfigError(
        f"{where}: {kind} of {bits} bits is not read; int of 2, 3, 4, 8 and float of 4, 8 are"
    )


def _granularity(where: str, config: Mapping[str, Any]) -> Granularity:
    group_size = config.get("group_size")
    strategy = text(config, "strategy", "group" if group_size else "tensor")
    if strategy == "tensor":
        return Granularity(None, None)
    if strategy == "channel" or group_size == -1:
        return Granularity(1, None)
    if strategy in ("group", "tensor_group") and isinstance(group_size, int) and group_size > 1:
        return Granularity(1, group_size)
    block = block_of(config.get("block_structure"))
    if strategy == "block" and block is not None:
        return block
    raise QuantConfigError(
        f"{where}: strategy {strategy!r} with group_size {group_size!r} and block_structure "
        f"{config.get('block_structure')!r} is not read"
    )


def _activation(where: str, config: Any) -> tuple[Activation, Number | None]:
    if not config:
        return Activation.NONE, None
    number, _ = _number(f"{where}.input_activations", config)
    strategy = text(config, "strategy", "tensor")
    if strategy == "token":
        return Activation.DYNAMIC_TOKEN, number
    if strategy in ("group", "tensor_group"):
        return Activation.DYNAMIC_GROUP, number
    return (Activation.DYNAMIC_TENSOR if config.get("dynamic") else Activation.STATIC_TENSOR), number


class _IntMatrix(StoredMatrix):
    def __init__(self, name: str, out_features: int, in_features: int, group: _Group) -> None:
        super().__init__(name, out_features, in_features)
        self._group = group
        self.check_groups(group.granularity.columns)

    def tensors(self) -> Sequence[StoredTensor]:
        group, rows, columns = self._group, self.out_features, self.in_features
        scale_shape = group.granularity.scale_shape(rows, columns)
        stored = [StoredTensor("weight_scale", scale_shape, SCALES)]
        if group.layout == "pack-quantized":
            words = num_words(columns, group.bits)
            stored.append(StoredTensor("weight_packed", (rows, words), (torch.int32,)))
            stored.append(StoredTensor("weight_shape", (2,), (torch.int64, torch.int32)))
            if not group.is_symmetric:
                zero_shape = (num_words(rows, group.bits), scale_shape[-1])
                stored.append(StoredTensor("weight_zero_point", zero_shape, (torch.int32,)))
        else:
            stored.append(StoredTensor("weight", (rows, columns), (torch.int8,)))
            if not group.is_symmetric:
                stored.append(StoredTensor("weight_zero_point", scale_shape, (torch.int8,)))
        if group.has_order:
            stored.append(StoredTensor("weight_g_idx", (columns,), (torch.int32,)))
        if group.activation is Activation.STATIC_TENSOR:
            stored.append(StoredTensor("input_scale", (1,), SCALES))
        return stored

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        group, rows, columns = self._group, self.out_features, self.in_features
        shape = group.granularity.scale_shape(rows, columns)
        scale, zero = tensors["weight_scale"].reshape(shape), tensors.get("weight_zero_point")
        half = 2 ** (group.bits - 1)
        if group.layout == "pack-quantized":
            codes = unpack_words(tensors["weight_packed"], group.bits, columns)
            if zero is not None:
                zero = centred_zero(unpack_words(zero.T, group.bits, rows).T, group.bits)
        else:
            codes = tensors["weight"].int() + half
        order = tensors.get("weight_g_idx")
        input_scale = tensors.get("input_scale")
        scheme = QuantScheme(
            Number.INT,
            group.bits,
            group.granularity,
            scale.dtype,
            is_symmetric=group.is_symmetric,
            has_column_order=order is not None,
            activation=group.activation,
            activation_number=group.activation_number,
        )
        return QuantizedWeight(
            scheme,
            rows,
            columns,
            centred_codes(codes, group.bits),
            scale,
            None if zero is None else zero.reshape(shape),
            order,
            None if input_scale is None else input_scale.float().reshape(()),
        )
