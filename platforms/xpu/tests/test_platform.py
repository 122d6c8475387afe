"""The platform's choices, and what it offers for a device that nobody has here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention_parity import make_layer
from inferplane.api.attention import AttentionQuery
from inferplane.api.config import EngineArgs, EngineConfig
from inferplane.api.linear import LinearShape
from inferplane.config import DeviceConfig, ModelConfig
from inferplane.quantization.rounding import FP8_CHANNEL, INT4_GROUPS
from inferplane_torch_accelerator import launch as shared_launch
from inferplane_torch_accelerator import runtime as shared_runtime
from inferplane_xpu import diagnosis, plugin
from inferplane_xpu.attention import XpuTorchAttention, XpuTritonAttention
from inferplane_xpu.cards import Card
from inferplane_xpu.platform import XpuPlatform
from inferplane_xpu.probing import describe
from inferplane_xpu.runtime import XpuRuntime

ARC = describe(Card("0000:03:00.0", 0xE20B, "xe", 12 << 30), 0)


def config(**options: Any) -> EngineConfig:
    model = ModelConfig("m", "/m", {}, "A", "float16", 128, 100)
    return EngineConfig(model, DeviceConfig("xpu"), plugin_options=options)


def test_it_is_torchs_xpu() -> None:
    runtime = XpuPlatform().device_runtime(ARC)
    assert isinstance(runtime, XpuRuntime)
    assert runtime.torch_device == torch.device("xpu", 0)
    assert XpuPlatform.collectives == "xccl"
    assert XpuPlatform().config_defaults(EngineArgs(), ARC, "bfloat16")["dtype"] == "bfloat16"


@pytest.mark.parametrize("asked", [False, True])
def test_graphs_have_to_be_asked_for(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    monkeypatch.setattr(torch.xpu, "set_device", lambda device: None)
    monkeypatch.setattr(shared_runtime, "AcceleratorGraphs", lambda device: f"graphs of {device}")
    runtime = XpuRuntime(ARC)
    runtime.set_up(config(xpu_graphs=asked), rank=0)
    assert runtime.graphs() == ("graphs of xpu:0" if asked else None)
    assert [each.name for each in plugin.engine_options()] == ["xpu_graphs"]


def test_without_a_triton_for_intel_torch_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "the installed triton compiles for amd, nvidia, not for intel"
    monkeypatch.setattr(shared_launch, "why_no_triton", lambda backend: said if backend == "intel" else None)
    layer = make_layer(torch.bfloat16, 16)
    query = AttentionQuery(layer=layer, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, device=ARC)
    assert XpuTritonAttention.unsupported_reason(query) == said
    assert XpuTorchAttention.unsupported_reason(query) is None
    assert {each.provider for each in plugin.op_implementations()} == {"vllm-xpu-kernels"}


def test_with_one_the_portable_kernels_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_launch, "why_no_triton", lambda backend: None)
    assert {each.provider for each in plugin.op_implementations()} == {
        "inferplane-kernels-triton",
        "vllm-xpu-kernels",
    }
    assert [each.name for each in plugin.attention_backends()] == ["xpu_triton", "xpu_torch"]
    assert [each.name for each in plugin.linear_kernels()] == ["xpu_dense"]
    fp8, int4, int8 = plugin.quantized_linear_kernels()
    assert (fp8.name, int4.name, int8.name) == ("xpu_fp8", "xpu_int4", "xpu_int8")
    assert (
        fp8.unsupported_reason(LinearShape("layer", 64, 32, torch.bfloat16, False, FP8_CHANNEL), ARC) is None
    )
    assert (
        int4.unsupported_reason(LinearShape("layer", 256, 32, torch.bfloat16, False, INT4_GROUPS), ARC)
        is None
    )


def test_the_extension_that_ended_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [each.check for each in plugin.diagnose()]
    assert checks == ["GPUs", "Level Zero", "torch build", "triton"]
    monkeypatch.setattr(diagnosis, "version", lambda name: "2.8.0")
    last = plugin.diagnose()[-1]
    assert (
        last.found
        == "intel-extension-for-pytorch 2.8.0 is installed; it ended with torch 2.8 and is not used"
    )
