"""Who multiplies weights of each format on a described device, asked of the platforms' kernels.

    python tests/support/format_cases.py    writes docs/formats.json

No device is needed: a kernel decides by a weight's scheme and a device's capabilities.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from inferplane.api import CapabilitySet, DeviceDescriptor
from inferplane.api.linear import LinearShape
from inferplane.api.quant import QuantFormat, StoredMatrix
from inferplane.api.quantized_experts import ExpertsShape
from inferplane.api.quantized_weight import QuantScheme
from inferplane.plugins import PluginSet, load_plugins
from inferplane.plugins.decision import Decision
from inferplane.quantization.ggml import TENSOR_TYPES
from inferplane.quantization.registry import GGUF, ONLINE, STORED
from quantized_checkpoints import torchao
from repository import ROOT

FILE = ROOT / "docs" / "formats.json"
COMMAND = "python tests/support/format_cases.py"
SIZE = 4096
"""Rows and columns of the matrix that is asked about."""


@dataclass(frozen=True)
class FormatCase:
    method: str
    variant: str
    config: Mapping[str, Any] = field(default_factory=dict)
    is_online: bool = False


def _packed(variant: str, weights: dict[str, Any], layout: str, **more: Any) -> FormatCase:
    group = {"targets": ["Linear"], "weights": weights, "format": layout, **more}
    return FormatCase("compressed-tensors", variant, {"config_groups": {"group_0": group}, "format": layout})


_TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token"}
_GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 128}
_FP8 = {"num_bits": 8, "type": "float"}
_FP4 = {"num_bits": 4, "type": "float"}
_QUARK = {"is_dynamic": False, "symmetric": True}


def _quark(variant: str, **weight: Any) -> FormatCase:
    return FormatCase("quark", variant, {"global_quant_config": {"weight": {**_QUARK, **weight}}})


GGUF_KINDS = (
    "Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ1_S", "IQ2_XS", "IQ3_S", "IQ4_XS", "TQ1_0", "TQ2_0",
    "MXFP4", "NVFP4",
)  # fmt: skip
CASES = [
    FormatCase("gptq", "4 bits", {"bits": 4, "group_size": 128}),
    FormatCase("gptq", "4 bits, zero points", {"bits": 4, "group_size": 128, "sym": False}),
    FormatCase("gptq", "4 bits, act-order", {"bits": 4, "group_size": 128, "desc_act": True}),
    FormatCase("gptq", "2 bits", {"bits": 2, "group_size": 128}),
    FormatCase("gptq", "3 bits", {"bits": 3, "group_size": 128}),
    FormatCase("gptq", "8 bits", {"bits": 8, "group_size": 128}),
    FormatCase("gptq", "5 bits", {"bits": 5, "group_size": 128}),
    FormatCase("awq", "gemm", {"bits": 4, "group_size": 128}),
    FormatCase("awq", "gemv", {"bits": 4, "group_size": 128, "version": "gemv"}),
    _packed("W4A16", _GROUPS, "pack-quantized"),
    _packed("W4A16, zero points", {**_GROUPS, "symmetric": False}, "pack-quantized"),
    _packed("W8A16", {"num_bits": 8, "strategy": "channel"}, "pack-quantized"),
    _packed(
        "W8A8", {"num_bits": 8, "strategy": "channel"}, "int-quantized", input_activations={**_TOKEN}
    ),
    _packed(
        "FP8", {**_FP8, "strategy": "channel"}, "float-quantized",
        input_activations={**_TOKEN, "type": "float"},
    ),
    _packed("MXFP4", {**_FP4, "strategy": "group", "group_size": 32}, "mxfp4-pack-quantized"),
    _packed("NVFP4", {**_FP4, "strategy": "tensor_group", "group_size": 16}, "nvfp4-pack-quantized"),
    _packed("MXFP8", {**_FP8, "strategy": "group", "group_size": 32}, "mxfp8-quantized"),
    _packed("FP8, blocks", {**_FP8, "strategy": "block", "block_structure": [128, 128]}, "float-quantized"),
    _packed(
        "FP8, blocks, activations by group", {**_FP8, "strategy": "block", "block_structure": [128, 128]},
        "float-quantized", input_activations={**_FP8, "dynamic": True, "strategy": "group", "group_size": 128},
    ),
    FormatCase(
        "compressed-tensors", "2:4 sparse",
        {"config_groups": {"group_0": {}}, "sparsity_config": {"format": "sparse-24-bitmask"}},
    ),
    FormatCase("fp8", "dynamic", {"activation_scheme": "dynamic"}),
    FormatCase("fp8", "static", {"activation_scheme": "static"}),
    FormatCase("fp8", "blocks of 128×128", {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    FormatCase("fbgemm_fp8", "by output"),
    FormatCase("bitsandbytes", "NF4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    FormatCase("bitsandbytes", "FP4", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
    FormatCase("bitsandbytes", "int8", {"load_in_8bit": True}),
    FormatCase("modelopt", "FP8", {"quant_algo": "FP8"}),
    FormatCase("modelopt", "FP8 by output", {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
    FormatCase("modelopt", "MXFP8", {"quant_algo": "MXFP8"}),
    FormatCase("modelopt", "NVFP4", {"quant_algo": "NVFP4"}),
    FormatCase("modelopt", "AWQ", {"quant_algo": "W4A16_AWQ"}),
    FormatCase("mxfp4", "experts of GPT-OSS"),
    _quark("int4", dtype="int4", qscheme="per_group", ch_axis=-1, group_size=128),
    _quark("uint4", dtype="uint4", qscheme="per_group", ch_axis=-1, group_size=128),
    _quark("int8", dtype="int8", qscheme="per_tensor"),
    _quark("FP8", dtype="fp8_e4m3", qscheme="per_tensor"),
    _quark("FP8 by output", dtype="fp8_e4m3", qscheme="per_channel", ch_axis=0),
    _quark("MXFP4", dtype="fp4", qscheme="per_group", ch_axis=-1, group_size=32, scale_format="e8m0"),
    _quark("MXFP6", dtype="fp6_e3m2", qscheme="per_group", ch_axis=-1, group_size=32, scale_format="e8m0"),
    FormatCase("torchao", "int4, groups of 128", torchao("Int4WeightOnlyConfig", group_size=128)),
    FormatCase("torchao", "int8", torchao("Int8WeightOnlyConfig")),
    FormatCase("torchao", "fp8, dynamic", torchao("Float8DynamicActivationFloat8WeightConfig")),
    *(FormatCase(GGUF, kind, {TENSOR_TYPES: {"layer": kind}}) for kind in GGUF_KINDS),
    *(FormatCase(method, "while loading", is_online=True) for method in ONLINE),
]  # fmt: skip


def described_devices() -> dict[str, DeviceDescriptor]:
    """By name, as a processor with AMX and a GPU of each platform describe themselves."""
    from inferplane_cuda import nvml
    from inferplane_cuda.probing import describe as describe_cuda
    from inferplane_rocm import topology
    from inferplane_rocm.probing import describe as describe_rocm
    from inferplane_xpu.cards import Card
    from inferplane_xpu.probing import describe as describe_xpu

    capabilities = CapabilitySet(["bf16_matmul", "fp16_matmul"])
    return {
        "cpu": DeviceDescriptor("cpu", 0, "a Xeon with AMX", 0, capabilities),
        "cuda": describe_cuda(nvml.Gpu("", "an H200", 141 << 30, (9, 0)), 0),
        "rocm": replace(describe_rocm(topology.Gpu("", "gfx942", 304, 64, 192 << 30), 0), name="an MI300X"),
        "xpu": replace(describe_xpu(Card("", 0xE20B, "xe", 12 << 30), 0), name="an Arc B580"),
    }


def rows() -> list[dict[str, str]]:
    """By format and variant what the weights are, and for each device the kernel that multiplies them, ``reference``
    with the others' reasons where they are dequantized, or why they are refused."""
    from inferplane_kernels_cpu import native
    from inferplane_torch_accelerator.launch import Launch

    found, plugins = [], load_plugins(quiet=True)
    # the described machines have compiler and library, whatever this one has
    with (
        mock.patch.object(Launch, "why_not", return_value=None),
        mock.patch.object(native, "unavailable_reason", return_value=None),
    ):
        for case in CASES:
            row = {"format": case.method, "variant": case.variant}
            found.append({**row, **_cells(case, plugins)})
    return found


def _cells(case: FormatCase, plugins: PluginSet) -> dict[str, str]:
    devices = described_devices()
    module, _, name = {**(ONLINE if case.is_online else STORED)}[case.method].partition(":")
    try:
        quantization: QuantFormat = getattr(importlib.import_module(module), name)(case.config)
    except ValueError as error:
        return {"scheme": "", **dict.fromkeys(devices, f"refused: {error}")}
    matrix = quantization.matrix("layer", SIZE, SIZE)
    serves = _serves
    if matrix is None:
        matrix, serves = quantization.stacked("experts", 8, SIZE, SIZE), _serves_experts
    assert matrix is not None, case
    scheme = _scheme(matrix)
    serving = {name: serves(scheme, device, plugins) for name, device in devices.items()}
    return {"scheme": str(scheme), **serving}


def _scheme(matrix: StoredMatrix) -> QuantScheme:
    tensors = {
        stored.suffix: torch.empty(
            [1 if size is None else size for size in stored.shape], dtype=stored.dtypes[0], device="meta"
        )
        for stored in matrix.tensors()
    }
    return matrix.read(tensors).scheme


def _serves(scheme: QuantScheme, device: DeviceDescriptor, plugins: PluginSet) -> str:
    shape = LinearShape("layer", SIZE, SIZE, torch.bfloat16, False, scheme)
    return _outcome(plugins.quantized_decision(shape, device))


def _serves_experts(scheme: QuantScheme, device: DeviceDescriptor, plugins: PluginSet) -> str:
    shape = ExpertsShape(
        name="experts", num_experts=8, first_expert=0, hidden_size=SIZE, intermediate_size=SIZE // 2,
        dtype=torch.bfloat16, activation="silu", swiglu_alpha=1.702, swiglu_limit=7.0, has_bias=True, gate_up=scheme,
        down=scheme,
    )  # fmt: skip
    return _outcome(plugins.experts_decision(shape, device))


def _outcome(decision: Decision) -> str:
    if decision.chosen.implementation is not None:
        return f"`{decision.chosen.name}`"
    reasons = [f"`{each.name}` {each.reason}" for each in decision.candidates if each.reason is not None]
    return ": ".join(["reference", *filter(None, ["; ".join(reasons)])])


def as_json() -> str:
    names = {name: device.name for name, device in described_devices().items()}
    return json.dumps({"devices": names, "rows": rows()}, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(as_json(), encoding="utf-8")
