"""The XPU platform's hooks. Importing this module imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from inferplane.api import (
    Diagnostic,
    OptionSpec,
    Platform,
    PluginManifest,
    Supported,
    Unsupported,
    hookimpl,
)
from inferplane_xpu.probing import PLATFORM, VISIBLE, probe

if TYPE_CHECKING:
    from inferplane.api.attention import AttentionBackend
    from inferplane.api.linear import LinearKernel
    from inferplane.api.ops import OpImpl
    from inferplane.api.quant import QuantizedLinearKernel
    from inferplane.api.quantized_experts import QuantizedExpertsKernel

MANIFEST = PluginManifest(name=PLATFORM, api=(2, 0), provides=("platform",))


@hookimpl
def probe_devices() -> Supported | Unsupported:
    return probe()


@hookimpl
def engine_options() -> Sequence[OptionSpec]:
    text = "Record graphs of decode steps on Intel GPUs, which torch has begun to support."
    return [OptionSpec(name="xpu_graphs", help=text, kind=bool, default=False)]


@hookimpl
def create_platform() -> Platform:
    from inferplane_xpu.platform import XpuPlatform

    return XpuPlatform()


@hookimpl
def attention_backends() -> Sequence[type[AttentionBackend]]:
    from inferplane_xpu.attention import XpuTorchAttention, XpuTritonAttention

    return [XpuTritonAttention, XpuTorchAttention]


@hookimpl
def linear_kernels() -> Sequence[type[LinearKernel]]:
    from inferplane_xpu.linear import XpuLinear

    return [XpuLinear]


@hookimpl
def quantized_linear_kernels() -> Sequence[type[QuantizedLinearKernel]]:
    from inferplane_xpu.linear import XpuFp8Linear, XpuInt4Linear, XpuInt8Linear

    return [XpuFp8Linear, XpuInt4Linear, XpuInt8Linear]


@hookimpl
def quantized_experts_kernels() -> Sequence[type[QuantizedExpertsKernel]]:
    from inferplane_xpu.experts import XpuEightBitExperts, XpuFourBitExperts

    return [XpuEightBitExperts, XpuFourBitExperts]


@hookimpl
def op_implementations() -> Sequence[OpImpl]:
    from inferplane_torch_accelerator.ops import triton_ops
    from inferplane_xpu.launch import LAUNCH
    from inferplane_xpu.vllm_ops import OP_IMPLEMENTATIONS

    return [*triton_ops(LAUNCH), *OP_IMPLEMENTATIONS]


@hookimpl
def diagnose() -> Sequence[Diagnostic]:
    from inferplane_xpu.diagnosis import diagnostics

    return diagnostics()


@hookimpl
def collect_env() -> Mapping[str, str]:
    from inferplane_xpu.cards import DriverError, read_cards

    variables = (VISIBLE, "ZE_FLAT_DEVICE_HIERARCHY", "ONEAPI_DEVICE_SELECTOR", "PYTORCH_ALLOC_CONF")
    try:
        facts = {
            "GPUs": "; ".join(
                f"{card.device_id:#06x} at {card.address}, driver {card.driver}" for card in read_cards()
            )
        }
    except DriverError as error:
        facts = {"GPUs": str(error)}
    return {**facts, **{name: os.environ[name] for name in variables if name in os.environ}}
