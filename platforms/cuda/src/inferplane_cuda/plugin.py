"""The CUDA platform's hooks. Importing this module imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from inferplane.api import Platform, PluginManifest, Supported, Unsupported, hookimpl
from inferplane_cuda.nvml import DriverError, driver_version, read_gpus
from inferplane_cuda.probing import PLATFORM, VISIBLE, probe

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
    from inferplane_cuda.platform import CudaPlatform

    return CudaPlatform()


@hookimpl
def attention_backends() -> Sequence[type[AttentionBackend]]:
    from inferplane_cuda.attention import CudaTorchAttention, CudaTritonAttention
    from inferplane_cuda.flash_attention import FlashAttention

    return [FlashAttention, CudaTritonAttention, CudaTorchAttention]


@hookimpl
def linear_kernels() -> Sequence[type[LinearKernel]]:
    from inferplane_cuda.linear import CudaLinear
    from inferplane_cuda.quack_linear import QuackLinear

    return [QuackLinear, CudaLinear]


@hookimpl
def quantized_linear_kernels() -> Sequence[type[QuantizedLinearKernel]]:
    from inferplane_cuda.linear import CudaFp8BlockLinear, CudaFp8Linear, CudaInt4Linear, CudaInt8Linear

    return [CudaFp8Linear, CudaFp8BlockLinear, CudaInt4Linear, CudaInt8Linear]


@hookimpl
def quantized_experts_kernels() -> Sequence[type[QuantizedExpertsKernel]]:
    from inferplane_cuda.experts import CudaEightBitExperts, CudaFourBitExperts

    return [CudaEightBitExperts, CudaFourBitExperts]


@hookimpl
def op_implementations() -> Sequence[OpImpl]:
    from inferplane_cuda.launch import LAUNCH
    from inferplane_torch_accelerator.ops import triton_ops

    return triton_ops(LAUNCH)


@hookimpl
def collect_env() -> Mapping[str, str]:
    variables = (
        VISIBLE,
        "CUDA_DEVICE_ORDER",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "NCCL_NVLS_ENABLE",
    )
    try:
        facts = {
            "driver": driver_version(),
            "GPUs": "; ".join(
                f"{gpu.name}, compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}, "
                f"{gpu.total_memory_bytes / 2**30:.0f} GiB"
                for gpu in read_gpus()
            ),
        }
    except DriverError as error:
        facts = {"driver": str(error)}
    return {**facts, **{name: os.environ[name] for name in variables if name in os.environ}}
