"""Four-bit floating point in small groups: MXFP4 (OCP MX 1.0), as GPT-OSS ships its experts, and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from inferplane.api.quant import (
    Granularity,
    Number,
    QuantFormat,
    QuantizedWeight,
    QuantScheme,
    StoredMatrix,
    StoredTensor,
)
from inferplane.api.quantized_weight import Activation
from inferplane.quantization.fp8 import MX_SCALES

_MX_GROUP, _NV_GROUP = 32, 16


class Mxfp4Format(QuantFormat):
    """Experts as ``{name}_blocks: [experts, out, in / 32, 16]`` and ``{name}_scales: [experts, out, in / 32]``; all
    else is plain."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        return None

    def stacked(
        self, name: str, num_matrices: int, out_features: int, in_features: int
    ) -> StoredMatrix | None:
        return _Mxfp4Experts(name, num_matrices, out_features, in_features)


class _Mxfp4Experts(StoredMatrix):
    def __init__(self, name: str, num_matrices: int, out_features: int, in_features: int) -> None:
        super().__init__(name, num_matrices * out_features, in_features)
        self._lead = (num_matrices, out_features)
        self.check_groups(_MX_GROUP)

    def tensors(self) -> Sequence[StoredTensor]:
        groups = self.in_features // _MX_GROUP
        return [
            StoredTensor("_blocks", (*self._lead, groups, _MX_GROUP // 2), (torch.uint8,)),
            StoredTensor("_scales", (*self._lead, groups), MX_SCALES),
        ]

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        codes = tensors["_blocks"].reshape(self.out_features, self.in_features // 2)
        return mx_weight(codes, tensors["_scales"].reshape(self.out_features, -1))


def mx_weight(codes: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """``codes: [out, in / 2]`` and ``scales: [out, in / 32]`` bytes, powers of two with a bias of 127."""
    scheme = QuantScheme(Number.FP4, 4, Granularity(1, _MX_GROUP), torch.float8_e8m0fnu)
    rows, half = codes.shape
    return QuantizedWeight(scheme, rows, 2 * half, codes, scales.contiguous().view(torch.float8_e8m0fnu))


class Fp4Matrix(StoredMatrix):
    """One matrix in bytes of two codes. With ``global_name`` it is NVFP4: groups of 16 with e4m3 scales, which one more
    number multiplies or divides."""

    def __init__(
        self,
        name: str,
        out_features: int,
        in_features: int,
        codes_name: str,
        scale_name: str,
        *,
        global_name: str | None,
        divides_by_global: bool = False,
    ) -> None:
        super().__init__(name, out_features, in_features)
        self._codes_name = codes_name
        self._scale_name = scale_name
        self._global_name = global_name
        self._divides = divides_by_global
        self._group = _MX_GROUP if global_name is None else _NV_GROUP
        self.check_groups(self._group)

    def tensors(self) -> Sequence[StoredTensor]:
        rows, columns = self.out_features, self.in_features
        types = MX_SCALES if self._global_name is None else (torch.float8_e4m3fn,)
        stored = [
            StoredTensor(self._codes_name, (rows, columns // 2), (torch.uint8,)),
            StoredTensor(self._scale_name, (rows, columns // self._group), types),
        ]
        if self._global_name is not None:
            stored.append(StoredTensor(self._global_name, (1,), (torch.float32,)))
        return stored

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        codes, scale = tensors[self._codes_name], tensors[self._scale_name]
        if self._global_name is None:
            return mx_weight(codes, scale)
        of_all = tensors[self._global_name].reshape(())
        wide = scale.float() / of_all if self._divides else scale.float() * of_all
        scheme = QuantScheme(
            Number.FP4,
            4,
            Granularity(1, _NV_GROUP),
            torch.float32,
            activation=Activation.DYNAMIC_GROUP,
            activation_number=Number.FP4,
        )
        return QuantizedWeight(scheme, self.out_features, self.in_features, codes, wide)
