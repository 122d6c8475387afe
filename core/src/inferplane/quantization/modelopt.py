"""The format of the ModelOpt library: FP8 by tensor and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from inferplane.api.quant import Granularity, QuantConfigError, QuantFormat, StoredMatrix
from inferplane.api.quantized_weight import Activation
from inferplane.quantization.fp8 import RECORDS, Fp8Matrix
from inferplane.quantization.mxfp4 import Fp4Matrix
from inferplane.quantization.names import is_among, name_list


class ModelOptFormat(QuantFormat):
    """``{name}.weight``, ``weight_scale``, ``input_scale`` and, of NVFP4, ``weight_scale_2``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = config.get("quantization", config)
        self._algorithm = config.get("quant_algo")
        if self._algorithm not in ("FP8", "NVFP4"):
            raise QuantConfigError(f"quant_algo should be FP8 or NVFP4, but is {self._algorithm!r}")
        # a star stands for anything
        excluded = name_list(config, "exclude_modules", "ignore")
        self._plain = [
            "re:" + name.replace(".", r"\.").replace("*", ".*") if "*" in name else name for name in excluded
        ]

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        if is_among(name, self._plain):
            return None
        if self._algorithm == "FP8":
            return Fp8Matrix(
                name,
                out_features,
                in_features,
                Granularity(None, None),
                Activation.STATIC_TENSOR,
                "weight_scale",
            )
        return Fp4Matrix(
            name, out_features, in_features, "weight", "weight_scale", global_name="weight_scale_2"
        )

    def may_drop(self, name: str, tensor: torch.Tensor) -> bool:
        return name.endswith(RECORDS)
