"""bitsandbytes: NF4 and FP4 in blocks (arXiv:2305.14314), with scales that may be quantized too, and int8 by output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import torch

from inferplane.api.quant import (
    PLAIN_DTYPES,
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
from inferplane.quantization.names import is_among, name_list

_BLOCK, _OUTER_BLOCK = 64, 256
_STATE = "weight.quant_state.bitsandbytes__"


class BitsAndBytesFormat(QuantFormat):
    """``{name}.weight`` in uint8, with ``weight.absmax`` and its companions, or in int8 with ``SCB``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._is_8bit = flag(config, "load_in_8bit", flag(config, "_load_in_8bit"))
        if not self._is_8bit and not flag(config, "load_in_4bit", flag(config, "_load_in_4bit")):
            raise QuantConfigError("neither load_in_4bit nor load_in_8bit is true")
        self._kind = text(config, "bnb_4bit_quant_type", "fp4")
        if self._kind not in ("nf4", "fp4"):
            raise QuantConfigError(f"bnb_4bit_quant_type should be nf4 or fp4, but is {self._kind!r}")
        self._is_nested = flag(config, "bnb_4bit_use_double_quant")
        self._plain = name_list(config, "llm_int8_skip_modules")

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        if is_among(name, self._plain):
            return None
        if self._is_8bit:
            return _Int8Matrix(name, out_features, in_features)
        return _FourBitMatrix(name, out_features, in_features, self._kind, self._is_nested)

    def may_drop(self, name: str, tensor: torch.Tensor) -> bool:
        return name.endswith(".weight_format")


class _Int8Matrix(StoredMatrix):
    def tensors(self) -> Sequence[StoredTensor]:
        return [
            StoredTensor("weight", (self.out_features, self.in_features), (torch.int8,)),
            StoredTensor("SCB", (self.out_features,), (torch.float32,)),
        ]

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        scheme = QuantScheme(Number.INT, 8, Granularity(1, None), torch.float32)
        scale = (tensors["SCB"] * (1 / 127)).unsqueeze(1)
        return QuantizedWeight(scheme, self.out_features, self.in_features, tensors["weight"], scale)


class _FourBitMatrix(StoredMatrix):
    """Blocks follow the matrix row by row, and may go from one row to the next."""

    def __init__(self, name: str, out_features: int, in_features: int, kind: str, is_nested: bool) -> None:
        super().__init__(name, out_features, in_features)
        self._kind = kind
        self._is_nested = is_nested
        if in_features % 2:
            raise self.fail(f"in_features {in_features} are odd, so that a byte has codes of two rows")

    def tensors(self) -> Sequence[StoredTensor]:
        size = self.out_features * self.in_features
        absmax_dtypes = (torch.uint8,) if self._is_nested else PLAIN_DTYPES
        stored = [
            StoredTensor("weight", (size // 2, 1), (torch.uint8,)),
            StoredTensor("weight.absmax", (None,), absmax_dtypes),
            StoredTensor("weight.quant_map", (16,), (torch.float32,)),
            StoredTensor(_STATE + self._kind, (None,), (torch.uint8,)),
        ]
        if self._is_nested:
            stored.append(StoredTensor("weight.nested_absmax", (None,), (torch.float32,)))
            stored.append(StoredTensor("weight.nested_quant_map", (256,), (torch.float32,)))
        return stored

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        state = self._state(tensors[_STATE + self._kind])
        packed = tensors["weight"].reshape(self.out_features, self.in_features // 2)
        # the even column is in the high half of its byte
        codes = (packed >> 4) | (packed << 4)
        block = state["blocksize"]
        absmax = self._absmax(tensors, state)
        size = gcd(block, self.in_features)
        if absmax.is_meta:
            scale = torch.empty(self.out_features, self.in_features // size, device="meta")
        else:
            starts = torch.arange(0, self.out_features * self.in_features, size, device=absmax.device)
            scale = absmax[starts // block].view(self.out_features, -1)
        scheme = QuantScheme(Number.TABLE4, 4, Granularity(1, size), torch.float32)
        return QuantizedWeight(
            scheme, self.out_features, self.in_features, codes, scale, table=tensors["weight.quant_map"]
        )

    def _state(self, stored: torch.Tensor) -> dict[str, Any]:
        if stored.is_meta:
            return {"blocksize": _BLOCK, "nested_blocksize": _OUTER_BLOCK, "nested_offset": 0.0}
        try:
            state = json.loads(bytes(stored.tolist()))
            shape, block = state["shape"], state["blocksize"]
        except (ValueError, KeyError, TypeError) as error:
            raise self.fail(f"its quant_state cannot be read: {error}") from error
        if shape != [self.out_features, self.in_features] or not isinstance(block, int) or block < 2:
            raise self.fail(f"its quant_state is of a matrix {shape} in blocks of {block}")
        return state

    def _absmax(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> torch.Tensor:
        absmax = tensors["weight.absmax"]
        if absmax.is_meta:
            return absmax
        num_blocks = -(-self.out_features * self.in_features // state["blocksize"])
        if len(absmax) != num_blocks:
            raise self.fail(f"absmax has {len(absmax)} numbers, but there are {num_blocks} blocks")
        if not self._is_nested:
            return absmax.float()
        values = tensors["weight.nested_quant_map"][absmax.int()]
        outer = tensors["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])[: len(values)]
        if len(outer) < len(values):
            raise self.fail(f"nested_absmax is for {len(outer)} blocks, but there are {num_blocks}")
        return values * outer + state["nested_offset"]
