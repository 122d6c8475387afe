"""The weights' kernels of `inferplane_kernels_cpu`, with what each is for."""

from __future__ import annotations

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import FusedMultiply, LinearKernel, LinearShape, Multiply
from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.linear import PackedLinear, WidenedLinear, can_pack
from inferplane_kernels_cpu.native_linear import DTYPES, NativeLinear
from inferplane_kernels_cpu.pages import move_weight

_NATIVE_PRODUCT = {torch.bfloat16: "bf16_matmul", torch.float16: "fp16_matmul"}


class NativeMultiply(NativeLinear, FusedMultiply):
    """A product of the native library, which takes norm and activation along."""


class CpuNativeLinear(LinearKernel):
    """Any plain weight, multiplied from where it lies with the best instructions of the machine."""

    name = "cpu_native"
    priority = 30

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        if shape.dtype not in DTYPES:
            return f"multiplies float32, bfloat16 and float16, not {shape.dtype}"
        if (reason := native.unavailable_reason()) is not None:
            return reason
        if shape.dtype == torch.float16 and device.capabilities.has("fp16_matmul"):
            return "torch multiplies float16 with instructions that it has not"
        return None

    @classmethod
    def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
        move_weight(weight)
        return NativeMultiply(weight, bias)


class CpuPackedLinear(LinearKernel):
    """Any dtype that the processor multiplies natively, in a packed layout."""

    name = "cpu_packed"
    priority = 20

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        if shape.dtype != torch.float32:
            capability = _NATIVE_PRODUCT.get(shape.dtype)
            if capability is None:
                return f"multiplies float32, bfloat16 and float16, not {shape.dtype}"
            if not device.capabilities.has(capability):
                return f"the processor has no {capability}"
        if not can_pack(shape.dtype):
            return f"torch does not pack {shape.dtype} weights on this machine"
        return None

    @classmethod
    def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
        return PackedLinear(weight, bias)


class CpuWidenedLinear(LinearKernel):
    """Half precision without native products: stored in half precision, multiplied in float32."""

    name = "cpu_widened"
    priority = 10

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        capability = _NATIVE_PRODUCT.get(shape.dtype)
        if capability is None:
            return f"widens bfloat16 and float16 only, not {shape.dtype}"
        if device.capabilities.has(capability):
            return f"not needed: the processor has {capability}"
        return None

    @classmethod
    def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
        return WidenedLinear(weight, bias)


LINEAR_KERNELS: list[type[LinearKernel]] = [CpuNativeLinear, CpuPackedLinear, CpuWidenedLinear]
