"""The format of the torchao library as its safetensors hold it: ``{name}._weight_qdata`` and what goes with it.

Which layout a matrix has follows from the class and the fields of the configuration that it was quantized by.
"""

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
from inferplane.api.quantized_weight import Activation
from inferplane.models.hf_fields import flag, whole_number
from inferplane.quantization.fp8 import SCALES
from inferplane.quantization.integers import centred_codes
from inferplane.quantization.names import is_among, matches, name_list

_CODES, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"


@dataclass(frozen=True)
class _Config:
    """One of torchao's configurations."""

    number: Number
    bits: int
    granularity: Granularity
    is_symmetric: bool = True
    is_packed: bool = False
    """Two codes a byte, with scales and offsets by group and row, as its ``Int4Tensor`` has them."""
    activation: Activation = Activation.NONE
    activation_number: Number | None = None


class TorchAoFormat(QuantFormat):
    """``quant_type`` is one configuration for all linear layers, or some by the names of layers (``FqnToConfig``)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        quant_type = config.get("quant_type")
        default = quant_type.get("default") if isinstance(quant_type, Mapping) else None
        if default is None:
            raise QuantConfigError(
                f"quant_type should be a table with a default configuration, but is {quant_type!r}: write the "
                "checkpoint anew with a torchao that stores safetensors"
            )
        if flag(config, "include_input_output_embeddings"):
            raise QuantConfigError(
                "include_input_output_embeddings is true: only linear layers are read quantized"
            )
        self._plain = name_list(config, "modules_to_not_convert")
        kind, fields = _type_and_fields("quant_type.default", default)
        by_name = {"_default": default}
        if kind in ("FqnToConfig", "ModuleFqnToConfig"):
            by_name = fields.get("fqn_to_config") or fields.get("module_fqn_to_config") or {}
        self._by_name = {
            name: None if each is None else _read(f"quant_type.default: {name}", each)
            for name, each in by_name.items()
        }

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        config = self._config_of(name)
        if config is None or is_among(name, self._plain):
            return None
        return _TorchAoMatrix(name, out_features, in_features, config)

    def _config_of(self, name: str) -> _Config | None:
        """By the name of the parameter or the layer, the first expression that matches one of them, or the default."""
        names = (f"{name}.weight", name)
        for known in names:
            if known in self._by_name:
                return self._by_name[known]
        for key, config in self._by_name.items():
            if key.startswith("re:") and any(matches(f"(?:{key[3:]})$", known) for known in names):
                return config
        return self._by_name.get("_default")


class _TorchAoMatrix(StoredMatrix):
    def __init__(self, name: str, out_features: int, in_features: int, config: _Config) -> None:
        super().__init__(name, out_features, in_features)
        self._config = config
        self.check_groups(config.granularity.columns)

    def tensors(self) -> Sequence[StoredTensor]:
        rows, columns = self._config.granularity.scale_shape(self.out_features, self.in_features)
        if self._config.is_packed:
            return [
                StoredTensor(_CODES, (self.out_features, self.in_features // 2), (torch.int8, torch.uint8)),
                StoredTensor(_SCALE, (columns, rows), SCALES),
                StoredTensor(_ZERO, (columns, rows), SCALES),
            ]
        is_float = self._config.number is Number.FP8_E4M3
        codes = torch.float8_e4m3fn if is_float else torch.int8
        stored = [
            StoredTensor(_CODES, (self.out_features, self.in_features), (codes,)),
            StoredTensor(_SCALE, (rows, columns), SCALES),
        ]
        if not is_float:
            # what is symmetric may have one, of zeros
            is_required = not self._config.is_symmetric
            stored.append(StoredTensor(_ZERO, (rows, columns), (torch.int8, torch.int32), is_required))
        return stored

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        config, codes, scale, zero = self._config, tensors[_CODES], tensors[_SCALE], tensors.get(_ZERO)
        offset = None
        if config.is_packed:
            # two's complement, and what is called a zero point is added behind the scale
            codes, scale, offset, zero = codes.view(torch.uint8) ^ 0x88, scale.T, tensors[_ZERO].T, None
        elif config.number is Number.INT:
            codes = centred_codes(codes.int() + 2 ** (config.bits - 1), config.bits)
            if config.is_symmetric:
                if zero is not None and not zero.is_meta and bool(zero.any()):
                    raise self.fail("its configuration is symmetric, but there are zero points other than 0")
                zero = None
        scheme = QuantScheme(
            config.number,
            config.bits,
            config.granularity,
            scale.dtype,
            is_symmetric=zero is None,
            has_offset=offset is not None,
            activation=config.activation,
            activation_number=config.activation_number,
        )
        return QuantizedWeight(
            scheme,
            self.out_features,
            self.in_features,
            codes,
            scale,
            None if zero is None else zero.to(torch.int8),
            offset=offset,
        )


def _type_and_fields(where: str, config: Any) -> tuple[str, Mapping[str, Any]]:
    fields = config.get("_data") if isinstance(config, Mapping) else None
    kind = config.get("_type") if isinstance(config, Mapping) else None
    if not isinstance(fields, Mapping) or not isinstance(kind, str):
        raise QuantConfigError(f"{where} should be a table with _type and _data, but is {config!r}")
    return kind, fields


def _read(where: str, config: Any) -> _Config:
    kind, fields = _type_and_fields(where, config)
    where = f"{where}: {kind}"
    if kind == "Int4WeightOnlyConfig":
        packing = _name(fields.get("int4_packing_format"), "PLAIN")
        if packing != "PLAIN":
            raise QuantConfigError(f"{where}: int4_packing_format {packing} is for one device; PLAIN is read")
        group = Granularity(1, whole_number(fields, "group_size", 128))
        return _Config(Number.INT, 4, group, is_packed=True)
    if kind == "Int8WeightOnlyConfig":
        return _Config(Number.INT, 8, _granularity(where, fields.get("granularity")))
    if kind == "Int8DynamicActivationInt8WeightConfig":
        return _Config(
            Number.INT, 8, _granularity(where, fields.get("granularity")), activation=Activation.DYNAMIC_TOKEN,
            activation_number=Number.INT,
        )  # fmt: skip
    if kind in ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"):
        return _intx(where, fields, is_dynamic=kind.startswith("Int8Dynamic"))
    if kind in ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"):
        return _float8(where, fields, is_dynamic="Dynamic" in kind)
    raise QuantConfigError(
        f"{where} is not read; Int4WeightOnly, Int8WeightOnly, Int8DynamicActivationInt8Weight, IntxWeightOnly, "
        "Int8DynamicActivationIntxWeight, Float8WeightOnly and Float8DynamicActivationFloat8Weight are"
    )


def _intx(where: str, fields: Mapping[str, Any], *, is_dynamic: bool) -> _Config:
    prefix = "weight_" if is_dynamic else ""
    dtype = _name(fields.get("weight_dtype"), "int8")
    packing = _name(fields.get("intx_packing_format"), "UNPACKED_TO_INT8")
    bits = {f"int{each}": each for each in range(2, 9)}.get(dtype)
    if bits is None or packing != "UNPACKED_TO_INT8":
        raise QuantConfigError(
            f"{where}: weight_dtype {dtype}, intx_packing_format {packing} is not read; int2 to int8, "
            "UNPACKED_TO_INT8 is"
        )
    return _Config(
        Number.INT,
        bits,
        _granularity(where, fields.get(f"{prefix}granularity")),
        is_symmetric=_name(fields.get(f"{prefix}mapping_type"), "SYMMETRIC") != "ASYMMETRIC",
        activation=Activation.DYNAMIC_TOKEN if is_dynamic else Activation.NONE,
        activation_number=Number.INT if is_dynamic else None,
    )


def _float8(where: str, fields: Mapping[str, Any], *, is_dynamic: bool) -> _Config:
    dtype = _name(fields.get("weight_dtype"), "float8_e4m3fn")
    if dtype != "float8_e4m3fn":
        raise QuantConfigError(f"{where}: weight_dtype {dtype} is not read; float8_e4m3fn is")
    pair = fields.get("granularity")
    # of activation and weight, where there are two
    of_activation, of_weight = pair if isinstance(pair, list) and len(pair) == 2 else (pair, pair)
    granularity = _granularity(where, of_weight)
    if not is_dynamic:
        return _Config(Number.FP8_E4M3, 8, granularity)
    is_by_tensor = _granularity(where, of_activation) == Granularity(None, None)
    activation = Activation.DYNAMIC_TENSOR if is_by_tensor else Activation.DYNAMIC_TOKEN
    return _Config(Number.FP8_E4M3, 8, granularity, activation=activation, activation_number=Number.FP8_E4M3)


def _granularity(where: str, config: Any) -> Granularity:
    if config is None:
        return Granularity(1, None)
    kind, fields = _type_and_fields(f"{where}: granularity", config)
    if kind == "PerTensor":
        return Granularity(None, None)
    if kind == "PerRow" or (kind == "PerAxis" and fields.get("axis") == 0):
        return Granularity(1, None)
    if kind == "PerGroup":
        return Granularity(1, whole_number(fields, "group_size"))
    block = fields.get("block_size")
    if kind == "PerBlock" and isinstance(block, list) and len(block) == 2:
        return Granularity(block[0], block[1])
    raise QuantConfigError(f"{where}: granularity {kind} {dict(fields)} is not read")


def _name(config: Any, default: str) -> str:
    """Of an enumeration's value or a dtype: ``{"_type": …, "_data": "PLAIN"}``."""
    value = config.get("_data") if isinstance(config, Mapping) else config
    return default if value is None else str(value)
