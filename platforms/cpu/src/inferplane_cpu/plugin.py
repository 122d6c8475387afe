"""The CPU platform's hooks. Importing this module imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from inferplane.api import (
    CapabilitySet,
    DeviceDescriptor,
    Diagnostic,
    Health,
    Platform,
    PluginManifest,
    Supported,
    hookimpl,
)
from inferplane.api.host_memory import host_memory
from inferplane_cpu.cores import usable_cores
from inferplane_cpu.processor import read_processor
from inferplane_kernels_cpu import native

if TYPE_CHECKING:
    from inferplane.api.attention import AttentionBackend
    from inferplane.api.linear import LinearKernel
    from inferplane.api.ops import OpImpl
    from inferplane.api.quant import QuantizedLinearKernel

MANIFEST = PluginManifest(name="cpu", api=(2, 0), provides=("platform",))


@hookimpl
def probe_devices() -> Supported:
    processor = read_processor()
    device = DeviceDescriptor(
        platform="cpu",
        index=0,
        name=f"{processor.name}, {usable_cores()} cores, {processor.vector_path}",
        total_memory_bytes=host_memory().total_bytes,
        capabilities=CapabilitySet(processor.capabilities),
    )
    return Supported("cpu", score=10, devices=(device,))


@hookimpl
def create_platform() -> Platform:
    from inferplane_cpu.platform import CpuPlatform

    return CpuPlatform()


@hookimpl
def attention_backends() -> Sequence[type[AttentionBackend]]:
    from inferplane_cpu.attention import CpuPagedAttention
    from inferplane_cpu.native_attention import CpuNativeAttention

    return [CpuNativeAttention, CpuPagedAttention]


@hookimpl
def op_implementations() -> Sequence[OpImpl]:
    from inferplane_cpu.ops import OP_IMPLEMENTATIONS

    return OP_IMPLEMENTATIONS


@hookimpl
def linear_kernels() -> Sequence[type[LinearKernel]]:
    from inferplane_cpu.linear import LINEAR_KERNELS

    return LINEAR_KERNELS


@hookimpl
def quantized_linear_kernels(device: DeviceDescriptor) -> Sequence[type[QuantizedLinearKernel]]:
    if device.platform != "cpu":
        return []
    from inferplane_cpu.quantized import QUANTIZED_KERNELS

    return QUANTIZED_KERNELS


@hookimpl
def collect_env() -> Mapping[str, str]:
    processor = read_processor()
    variables = ("OMP_NUM_THREADS", "KMP_AFFINITY", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "LD_PRELOAD")
    return {
        "processor": processor.name,
        "vector path": processor.vector_path,
        "native matrix products": ", ".join(processor.capabilities) or "float32 only",
        "native kernels": native.unavailable_reason() or native.level(),
        "usable cores": str(usable_cores()),
        **{name: os.environ[name] for name in variables if name in os.environ},
    }


@hookimpl
def diagnose() -> Sequence[Diagnostic]:
    check = "native kernels"
    try:
        reason = native.unavailable_reason()
    except ValueError as error:
        return [Diagnostic(check, Health.FAULT, str(error), f"unset {native.LEVEL_VARIABLE}")]
    if reason is None:
        return [Diagnostic(check, Health.OK, f"{native.level()}, of {', '.join(native.levels())}")]
    return [Diagnostic(check, Health.WARNING, f"none, torch's operators serve: {reason}", native.mend())]
