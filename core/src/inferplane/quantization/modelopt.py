"""The format of the ModelOpt library: FP8 by tensor or by output, MXFP8 and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from inferplane.api.quant import Granularity, QuantConfigError, QuantFormat, StoredMatrix
from inferplane.api.quantized_weight import CHANNEL, TENSOR, Activation
from inferplane.quantization.fp8 import MX_SCALES, RECORDS, SCALES, Fp8Matrix
from inferplane.quantization.mxfp4 import Fp4Matrix
from inferplane.quantization.names import is_among, name_list, with_stars

_FP8 = {
    "FP8": (TENSOR, Activation.STATIC_TENSOR, SCALES),
    "FP8_PER_CHANNEL_PER_TOKEN": (CHANNEL, Activation.DYNAMIC_TOKEN, SCALES),
    "MXFP8": (Granularity(1, 32), Activation.DYNAMIC_GROUP, MX_SCALES),
}


class ModelOptFormat(QuantFormat):
    """``{name}.weight``, ``weight_scale``, ``input_scale`` and, of NVFP4, ``weight_scale_2``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = config.get("quantization", config)
        self._algorithm = config.get("quant_algo")
        if self._algorithm not in (*_FP8, "NVFP4"):
            raise QuantConfigError(
                f"quant_algo {self._algorithm!r} is not read; {', '.join(_FP8)} and NVFP4 are"
            )
        self._plain = [with_stars(name) for name in name_list(config, "exclude_modules", "ignore")]

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        if is_among(name, self._plain):
            return None
        if self._algorithm in _FP8:
            granularity, activation, scales = _FP8[self._algorithm]
            return Fp8Matrix(name, out_features, in_features, granularity, activation, "weight_scale", scales)
        return Fp4Matrix(
            name, out_features, in_features, "weight", "weight_scale", global_name="weight_scale_2"
        )

    def may_drop(self, name: str, tensor: torch.Tensor) -> bool:
        return name.endswith(RECORDS)
