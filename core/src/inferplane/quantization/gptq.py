"""GPTQ (arXiv:2210.17323): whole numbers of 2, 3, 4 or 8 bits, packed along the input, with zero points by group."""

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
from inferplane.models.hf_fields import flag, text, whole_number
from inferplane.quantization.bits import num_words, unpack_words
from inferplane.quantization.integers import centred_codes, centred_zero
from inferplane.quantization.names import is_among, matches

logger = logging.getLogger(__name__)

_HALF = (torch.float16, torch.bfloat16, torch.float32)
_INT32 = (torch.int32,)


@dataclass(frozen=True)
class _Settings:
    bits: int
    group_size: int
    """-1: one group has all columns."""
    is_symmetric: bool
    has_order: bool
    """Whether groups were made of columns in the order of their weight in the error (``desc_act``)."""


class GptqFormat(QuantFormat):
    """``{name}.qweight``, ``qzeros``, ``scales`` and ``g_idx``.

    Version 1 stores zero points less one, modulo what the bits can hold; version 2 (``checkpoint_format: gptq_v2``)
    stores them as they are.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._settings = _read_settings(config, None)
        version = text(config, "checkpoint_format", "gptq")
        if version not in ("gptq", "gptq_v2"):
            raise QuantConfigError(f"checkpoint_format {version!r} is not known; there are gptq and gptq_v2")
        self._zero_offset = 1 if version == "gptq" else 0
        if flag(config, "lm_head"):
            raise QuantConfigError("lm_head is quantized, which is not read; quantize the model without it")
        self._of_layers = config.get("dynamic") or {}
        if not isinstance(self._of_layers, Mapping):
            raise QuantConfigError(
                f"dynamic should be a table of settings by layer, but is {self._of_layers!r}"
            )
        blocks = config.get("modules_in_block_to_quantize") or []
        self._only = [name for part in blocks for name in ([part] if isinstance(part, str) else part)]

    def matrix(self, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
        if self._only and not is_among(name, self._only):
            return None
        settings = self._settings
        for rule, changes in self._of_layers.items():
            if rule.startswith("-:"):
                if matches(rule[2:], name):
                    return None
            elif matches(rule.removeprefix("+:"), name):
                settings = _read_settings(changes, settings)
                break
        return _GptqMatrix(name, out_features, in_features, settings, self._zero_offset)

    def may_drop(self, name: str, tensor: torch.Tensor) -> bool:
        """Older tools write a bias of zeros for layers that have none."""
        return name.endswith(".bias") and not tensor.any()


def _read_settings(config: Mapping[str, Any], base: _Settings | None) -> _Settings:
    group_size = config.get("group_size", base.group_size if base else None)
    if not isinstance(group_size, int) or group_size < -1 or group_size in (0, 1):
        raise QuantConfigError(f"group_size should be -1 or a number of columns, but is {group_size!r}")
    bits = whole_number(config, "bits", base.bits if base else None)
    if bits not in (2, 3, 4, 8):
        raise QuantConfigError(f"bits should be 2, 3, 4 or 8, but is {bits}")
    return _Settings(
        bits,
        group_size,
        flag(config, "sym", base.is_symmetric if base else True),
        flag(config, "desc_act", base.has_order if base else False),
    )


class _GptqMatrix(StoredMatrix):
    def __init__(
        self, name: str, out_features: int, in_features: int, settings: _Settings, zero_offset: int
    ) -> None:
        super().__init__(name, out_features, in_features)
        self._settings = settings
        self._zero_offset = zero_offset
        self._group_size = in_features if settings.group_size == -1 else settings.group_size
        for what, size in (("in_features", in_features), ("out_features", out_features)):
            if size * settings.bits % 32:
                raise self.fail(f"{what} {size} of {settings.bits} bits fill no whole number of 32-bit words")

    def tensors(self) -> Sequence[StoredTensor]:
        bits, rows, columns = self._settings.bits, self.out_features, self.in_features
        groups = -(-columns // self._group_size)
        return [
            StoredTensor("qweight", (num_words(columns, bits), rows), _INT32),
            StoredTensor("qzeros", (groups, num_words(rows, bits)), _INT32),
            StoredTensor("scales", (groups, rows), _HALF),
            StoredTensor("g_idx", (columns,), _INT32, is_required=self._settings.has_order),
        ]

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        settings, bits = self._settings, self._settings.bits
        codes = unpack_words(tensors["qweight"].T, bits, self.in_features)
        stored_zero = unpack_words(tensors["qzeros"], bits, self.out_features)
        zero = (stored_zero + self._zero_offset) & (2**bits - 1)
        scale = tensors["scales"].T.contiguous()
        is_symmetric = settings.is_symmetric and (zero.is_meta or bool((zero == 2 ** (bits - 1)).all()))
        groups = self._column_groups(tensors.get("g_idx"))
        scheme = QuantScheme(
            Number.INT,
            bits,
            Granularity(1, None if self._group_size >= self.in_features else self._group_size),
            scale.dtype,
            is_symmetric=is_symmetric,
            has_column_order=groups is not None,
        )
        return QuantizedWeight(
            scheme,
            self.out_features,
            self.in_features,
            centred_codes(codes, bits),
            scale,
            None if is_symmetric else centred_zero(zero.T.contiguous(), bits),
            groups,
        )

    def _column_groups(self, stored: torch.Tensor | None) -> torch.Tensor | None:
        """None where each column is in the group of its position."""
        if stored is None or stored.is_meta:
            return stored if self._settings.has_order else None
        usual = torch.arange(self.in_features, device=stored.device) // self._group_size
        if torch.equal(stored, usual.to(stored.dtype)):
            return None
        num_groups = -(-self.in_features // self._group_size)
        if stored.min() < 0 or stored.max() >= num_groups:
            raise self.fail(
                f"g_idx names groups {int(stored.min())} to {int(stored.max())}, but there are {num_groups}"
            )
        return stored
