"""A plugin that brings a format of quantized weights and a kernel for them, and who would multiply them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inferplane import LLM, SamplingParams
from inferplane.config import EngineArgs
from inferplane.models.registry import build_model
from inferplane.plugins import load_plugins
from inferplane.plugins.explanation import explain
from model_harness import PromptRun, make_context, read_config, read_tensors
from toy_plugins import ToyIndex

PROMPT = [5, 9, 2, 31, 77, 8]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


PLUGIN = """
from inferplane.api import *
MANIFEST = PluginManifest(name="toy", api=API_VERSION, provides=("quantization",))
shapes = []

@hookimpl
def quant_formats():
    return {"toy_signs": __name__ + ":Signs"}

@hookimpl
def quantized_linear_kernels(device):
    import torch
    from inferplane.api.quant import QuantizedLinearKernel, Number
    class SignKernel(QuantizedLinearKernel):
        name, priority = "toy_kernel", 5
        @classmethod
        def unsupported_reason(cls, shape, device):
            shapes.append(shape)
            return None if shape.scheme.number is Number.INT else "multiplies whole numbers only"
        @classmethod
        def prepare(cls, weight, bias):
            codes, scale = weight.codes, weight.scale.flatten()
            return lambda x: torch.nn.functional.linear(x, codes.to(x.dtype), None) * scale.to(x.dtype)
    return [SignKernel]

def __getattr__(name):
    if name != "Signs":
        raise AttributeError(name)
    import torch
    from inferplane.api.quant import (
        PLAIN_DTYPES, Granularity, Number, QuantFormat, QuantScheme, QuantizedWeight, StoredMatrix, StoredTensor)
    class Matrix(StoredMatrix):
        def tensors(self):
            return [StoredTensor("weight", (self.out_features, self.in_features), PLAIN_DTYPES)]
        def read(self, tensors):
            weight = tensors["weight"].float()
            scheme = QuantScheme(Number.INT, 8, Granularity(1, None), torch.float32)
            scale = weight.abs().mean(1, keepdim=True)
            return QuantizedWeight(scheme, *weight.shape, weight.sign().to(torch.int8), scale)
    class Signs(QuantFormat):
        def __init__(self, config):
            pass
        def matrix(self, name, out_features, in_features):
            return Matrix(name, out_features, in_features)
    return Signs
"""


def test_a_format_and_a_kernel_from_outside(toys: ToyIndex, folder: Path) -> None:
    toys.install("toy", PLUGIN)
    model = build_model(make_context(read_config(folder)))
    model.load_weights(
        (name, t.sign() * t.abs().mean(1, keepdim=True) if "_proj." in name else t)
        for name, t in read_tensors(folder)
    )
    want = PromptRun(model).logits([PROMPT])[0][-1].argmax().item()
    with LLM(str(folder), device="reference", kv_cache_bytes=4 << 20, quantization="toy_signs") as llm:
        [output] = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids[0] == want
    args = EngineArgs(model=str(folder), device="reference", quantization="toy_signs")
    choices = [each for each in explain(args, load_plugins()).choices if each.kind == "quantized"]
    assert {choice.decision.chosen.name for choice in choices} == {"toy_kernel"}
    assert "int8, channel" in choices[0].detail
    assert choices[0].losing_reason(1) == "could serve too, with priority -1000 below 5"


def test_explained_without_a_kernel(folder: Path) -> None:
    args = EngineArgs(model=str(folder), device="reference", quantization="fp8")
    choices = [each for each in explain(args, load_plugins()).choices if each.kind == "quantized"]
    assert {choice.decision.chosen.name for choice in choices} == {"dequantize"}


EXPERTS_PLUGIN = """
from inferplane.api import *
MANIFEST = PluginManifest(name="toy", api=API_VERSION, provides=("quantization",))

@hookimpl
def quantized_experts_kernels(device):
    from inferplane.api.ops import fused_experts
    from inferplane.api.quantized_experts import QuantizedExpertsKernel
    class Toy(QuantizedExpertsKernel):
        name, priority = "toy_experts", 5
        @classmethod
        def unsupported_reason(cls, shape, device):
            return None if shape.gate_up.number.value == "fp8_e4m3" else "multiplies fp8 only"
        @classmethod
        def prepare(cls, shape, gate_up, down, gate_up_bias, down_bias):
            w13, w2 = (each.dequantize(shape.dtype).unflatten(0, (shape.num_experts, -1)) for each in (gate_up, down))
            return lambda x, weights, ids: fused_experts(x, weights, ids, w13, w2, first_expert=shape.first_expert)
    return [Toy]
"""


def test_a_kernel_for_experts_from_outside(toys: ToyIndex, tiny_model: Callable[[str], Path]) -> None:
    """The same tokens as where they are dequantized, and who was asked."""
    folder, outputs = tiny_model("qwen3_moe"), []
    for installs in (False, True):
        if installs:
            toys.install("toy", EXPERTS_PLUGIN)
        with LLM(str(folder), device="reference", kv_cache_bytes=4 << 20, quantization="fp8") as llm:
            outputs += llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    chosen = {"fp8": "toy_experts", "int8": "dequantize"}
    for method, name in chosen.items():
        args = EngineArgs(model=str(folder), device="reference", quantization=method)
        choices = [each for each in explain(args, load_plugins()).choices if each.kind == "experts"]
        assert {choice.decision.chosen.name for choice in choices} == {name}
        assert choices[0].detail.startswith("8 experts of 64 × 48, ")
    assert choices[0].losing_reason(0) == "multiplies fp8 only"
