"""Which class reads which ``quantization_config``. Free of torch until a format is made."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inferplane.models.errors import ModelLoadError
from inferplane.quantization.ggml import METHOD as GGUF

if TYPE_CHECKING:
    from inferplane.api.quant import QuantFormat
    from inferplane.config import EngineConfig

STORED: Mapping[str, str] = {
    "awq": "inferplane.quantization.awq:AwqFormat",
    "bitsandbytes": "inferplane.quantization.bitsandbytes:BitsAndBytesFormat",
    "compressed-tensors": "inferplane.quantization.compressed_tensors:CompressedTensorsFormat",
    "fbgemm_fp8": "inferplane.quantization.fp8:FbgemmFp8Format",
    "fp8": "inferplane.quantization.fp8:Fp8Format",
    GGUF: "inferplane.quantization.gguf:GgufFormat",
    "gptq": "inferplane.quantization.gptq:GptqFormat",
    "modelopt": "inferplane.quantization.modelopt:ModelOptFormat",
    "mxfp4": "inferplane.quantization.mxfp4:Mxfp4Format",
    "quark": "inferplane.quantization.quark:QuarkFormat",
    "torchao": "inferplane.quantization.torchao:TorchAoFormat",
}
"""``"module:Class"`` of a `QuantFormat` by ``quant_method`` of a checkpoint."""

ONLINE: Mapping[str, str] = {
    "fp8": "inferplane.quantization.online:OnlineFp8",
    "int4": "inferplane.quantization.online:OnlineInt4",
    "int8": "inferplane.quantization.online:OnlineInt8",
    "mxfp4": "inferplane.quantization.online:OnlineMxfp4",
}
"""What ``--quantization`` makes of a plain checkpoint while it is loaded."""

DEQUANTIZE = "dequantize"
"""What ``--quantization`` says to have plain weights of a quantized checkpoint, whatever kernels there are."""


def quantization_method(hf_config: Mapping[str, Any]) -> str | None:
    """``quant_method`` of a checkpoint; None of a plain one. Raises `ModelLoadError` when it has no name."""
    config = hf_config.get("quantization_config")
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    if not isinstance(method, str):
        raise ModelLoadError(
            f"quantization_config should be a table with a quant_method, but is {config!r}: mend config.json"
        )
    return method


def format_target(method: str | None, asked: str | None, plugin_formats: Mapping[str, str]) -> str | None:
    """``"module:Class"`` for a checkpoint's ``method`` and the user's ``--quantization``; None for plain weights.

    A plugin's format takes the place of a built-in one of the same name. Raises `ModelLoadError` for a method that
    nobody reads and for a wish that the checkpoint does not allow.
    """
    if method is None:
        if asked == DEQUANTIZE:
            raise ModelLoadError(
                "--quantization is dequantize, but the checkpoint is plain already: leave it out"
            )
        known, name, whose = {**ONLINE, **plugin_formats}, asked, "--quantization"
    else:
        if asked not in (None, method, DEQUANTIZE):
            raise ModelLoadError(
                f"--quantization is {asked}, but the checkpoint is quantized already, as {method}: leave it out, or "
                f"use {DEQUANTIZE}"
            )
        known, name, whose = {**STORED, **plugin_formats}, method, "the checkpoint's quant_method"
    if name is None:
        return None
    if name not in known:
        raise ModelLoadError(
            f"{whose} {name!r} is none that can be read; there are {', '.join(sorted(known))}. Use the model's "
            "unquantized checkpoint or a GGUF file, or install a plugin that brings the format"
        )
    return known[name]


def make_format(config: EngineConfig, plugin_formats: Mapping[str, str]) -> QuantFormat | None:
    """The format of a model's weights. Raises `ModelLoadError` naming what in its configuration cannot be read."""
    hf_config = config.model.hf_config
    method, asked = quantization_method(hf_config), config.model.quantization
    target = format_target(method, asked, plugin_formats)
    # random bytes would be no numbers that a block could hold
    if target is None or (method == GGUF and config.load.load_format == "dummy"):
        return None
    module, _, name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(
            f"{target}, which reads {method or asked} weights, cannot be imported: {error}"
        ) from error
    try:
        return found(hf_config.get("quantization_config") or {})
    except ValueError as error:
        raise ModelLoadError(f"quantization_config ({method or asked}): {error}") from error
