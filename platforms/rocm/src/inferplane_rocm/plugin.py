"""The ROCm platform's hooks. Importing this module imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from inferplane.api import (
    Diagnostic,
    Platform,
    PluginManifest,
    Supported,
    Unsupported,
    hookimpl,
)
from inferplane_rocm.probing import PLATFORM, VISIBLE_TO_DRIVER, VISIBLE_TO_RUNTIME, probe
from inferplane_rocm.topology import DriverError, driver_version, read_gpus

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
def create_platform() -> Platform:
    from inferplane_rocm.platform import RocmPlatform

    return RocmPlatform()


@hookimpl
def attention_backends() -> Sequence[type[AttentionBackend]]:
    from inferplane_rocm.aiter_attention import AiterAttention
    from inferplane_rocm.attention import RocmTorchAttention, RocmTritonAttention

    return [AiterAttention, RocmTritonAttention, RocmTorchAttention]


@hookimpl
def linear_kernels() -> Sequence[type[LinearKernel]]:
    from inferplane_rocm.linear import RocmLinear

    return [RocmLinear]


@hookimpl
def quantized_linear_kernels() -> Sequence[type[QuantizedLinearKernel]]:
    from inferplane_rocm.linear import RocmFp8BlockLinear, RocmFp8Linear, RocmInt4Linear, RocmInt8Linear

    return [RocmFp8Linear, RocmFp8BlockLinear, RocmInt4Linear, RocmInt8Linear]


@hookimpl
def quantized_experts_kernels() -> Sequence[type[QuantizedExpertsKernel]]:
    from inferplane_rocm.experts import RocmEightBitExperts, RocmFourBitExperts

    return [RocmEightBitExperts, RocmFourBitExperts]


@hookimpl
def op_implementations() -> Sequence[OpImpl]:
    from inferplane_rocm.launch import LAUNCH
    from inferplane_torch_accelerator.ops import triton_ops

    return triton_ops(LAUNCH)


@hookimpl
def diagnose() -> Sequence[Diagnostic]:
    from inferplane_rocm.diagnosis import diagnostics

    return diagnostics()


@hookimpl
def collect_env() -> Mapping[str, str]:
    variables = (VISIBLE_TO_DRIVER, *VISIBLE_TO_RUNTIME, "HSA_OVERRIDE_GFX_VERSION", "PYTORCH_ALLOC_CONF")
    try:
        gpus = [
            f"{gpu.architecture}, {gpu.num_compute_units} compute units, {gpu.total_memory_bytes / 2**30:.0f} GiB"
            for gpu in read_gpus()
        ]
        facts = {"driver": driver_version() or "the kernel's own", "GPUs": "; ".join(gpus)}
    except DriverError as error:
        facts = {"driver": str(error)}
    return {**facts, **{name: os.environ[name] for name in variables if name in os.environ}}
