"""Quantized weights of every format that the kernel takes, against the format's own dequantizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import gguf_files
import tiny_models
from inferplane.api import CapabilitySet, DeviceDescriptor
from inferplane.api.act_order import Reordered
from inferplane.api.linear import LinearShape
from inferplane.api.quantized_weight import Granularity, Number, QuantizedWeight, QuantScheme, pack_nibbles
from inferplane.config.args import EngineArgs
from inferplane.models.loader.gguf import GGUFFile
from inferplane.models.registry import build_model
from inferplane.plugins.explanation import explain
from inferplane.plugins.plugin_set import load_plugins
from inferplane.quantization.gguf import GgufFormat
from inferplane_cpu.platform import CpuPlatform
from inferplane_cpu.quantized import CpuQuantizedBf16Linear, CpuQuantizedLinear
from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native_linear import NativeLinear
from model_harness import PromptRun, make_context

needs_native = pytest.mark.skipif(native.unavailable_reason() is not None, reason="no native kernels here")

CPU = DeviceDescriptor("cpu", 0, "test", 1 << 30, CapabilitySet(("bf16_matmul",)))


def check(weight: QuantizedWeight, want: torch.Tensor) -> None:
    """The packed rows are those of the format, and products are near those by them."""
    for kernel, tolerance in ((CpuQuantizedLinear, 2.0**-12), (CpuQuantizedBf16Linear, 2.0**-8)):
        dtype = kernel.activations
        bias = torch.randn(weight.out_features).to(dtype)
        shape = LinearShape("m", weight.in_features, weight.out_features, dtype, True, scheme=weight.scheme)
        assert kernel.unsupported_reason(shape, CPU) is None
        product = kernel.prepare(weight, bias)
        for num_rows in (1, 5, 40):
            x = torch.randn(num_rows, weight.in_features).to(dtype)
            exact = x.double() @ want.double().T + bias.double()
            error = (product(x).double() - exact).abs()
            assert (error <= tolerance * (exact.abs() + x.double().abs() @ want.double().abs().T)).all()
        if weight.column_group is None:
            rows = product.rows(torch.arange(weight.out_features))
            assert rows.dtype == dtype
            # what lies between two neighbours in bfloat16 may be either
            rtol = 1e-6 if dtype == torch.float32 else 2.0**-7
            torch.testing.assert_close(rows, want.to(dtype), rtol=rtol, atol=1e-7)


@needs_native
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_of_gguf_as_its_own_tools_write_them(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    rows = gguf.quantize(np.random.default_rng(2).standard_normal((50, 96), dtype=np.float32), kind)
    check(read_gguf(name, rows, 96), torch.from_numpy(gguf.dequantize(rows, kind)))


@needs_native
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_blocks_of_gguf(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(3).integers(0, 256, (35 * 2, size), dtype=np.uint8)
    for place in [208] if name == "Q6_K" else [0, 2]:  # scales of some thousandths
        blocks[:, place : place + 2] = (
            np.random.default_rng(4).uniform(1e-3, 4e-3, (70, 1)).astype(np.float16).view(np.uint8)
        )
    rows = blocks.reshape(35, -1)
    check(read_gguf(name, rows, 512), torch.from_numpy(gguf.dequantize(rows, kind)))


def read_gguf(name: str, rows: np.ndarray, num_values: int) -> QuantizedWeight:
    matrix = GgufFormat({"tensor_types": {"m": name}}).matrix("m", len(rows), num_values)
    assert matrix is not None
    return matrix.read({"weight": torch.from_numpy(rows)})


@needs_native
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("columns", [32, 128, None])
@pytest.mark.parametrize("extra", ["symmetric", "zeros", "act-order", "uneven act-order"])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_groups_channels_zeros_and_orders(
    bits: int, columns: int | None, extra: str, scale_dtype: torch.dtype
) -> None:
    rows, width = 24, 160
    granularity = Granularity(1, columns)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, width), dtype=torch.int8)
    scale = (torch.rand(granularity.scale_shape(rows, width)) * 0.01 + 1e-3).to(scale_dtype)
    zero = torch.randint(-2, 2, scale.shape, dtype=torch.int8) if extra == "zeros" else None
    group = None
    if "act-order" in extra:
        group = (torch.arange(width) // (columns or width))[torch.randperm(width)].int()
        if extra.startswith("uneven"):
            group[0] = group.max() - group[0]
    scheme = QuantScheme(
        Number.INT,
        bits,
        granularity,
        scale_dtype,
        is_symmetric=zero is None,
        has_column_order=group is not None,
    )
    packed = pack_nibbles(codes + 8) if bits <= 4 else codes
    weight = QuantizedWeight(scheme, rows, width, packed, scale, zero, group)
    check(weight, weight.dequantize(torch.float32))


@needs_native
@pytest.mark.parametrize(
    ("columns_of_a_group", "kind"), [(16, Reordered), (11, Reordered), (10, NativeLinear), (4, NativeLinear)]
)
def test_a_part_with_few_columns_of_each_group_is_dequantized(columns_of_a_group: int, kind: type) -> None:
    """Each group is filled up to 16 columns, which of 4, as one of 8 ranks has of groups of 32, would be 4 times."""
    rows, num_groups = 24, 10
    width = num_groups * columns_of_a_group
    scheme = QuantScheme(Number.INT, 4, Granularity(1, 32), torch.float16, has_column_order=True)
    weight = QuantizedWeight(
        scheme,
        rows,
        width,
        torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8),
        (torch.rand(rows, num_groups) * 0.01).half(),
        column_group=torch.arange(num_groups, dtype=torch.int32).repeat(columns_of_a_group),
    )
    assert type(CpuQuantizedLinear.prepare(weight, None)) is kind
    check(weight, weight.dequantize(torch.float32))


@needs_native
@pytest.mark.parametrize("granularity", [Granularity(None, None), Granularity(8, 32)], ids=str)
def test_scales_of_several_rows(granularity: Granularity) -> None:
    codes = torch.randint(-128, 128, (20, 64), dtype=torch.int8)
    scale = torch.rand(granularity.scale_shape(20, 64)) * 0.01
    weight = QuantizedWeight(QuantScheme(Number.INT, 8, granularity, torch.float32), 20, 64, codes, scale)
    check(weight, weight.dequantize(torch.float32))


@needs_native
@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"dtype": torch.bfloat16}, "multiplies torch.float32 activations, not torch.bfloat16"),
        ({"dtype": torch.float16}, "multiplies torch.float32 activations, not torch.float16"),
        ({"number": Number.NF4}, "multiplies whole numbers, not nf4"),
        ({"granularity": Granularity(1, 24)}, "multiple of 16 columns, not 24"),
        ({"needs_rows": True, "has_column_order": True}, "act-order"),
    ],
)
def test_what_it_does_not_take_it_says(shape: Mapping[str, Any], reason: str) -> None:
    scheme = QuantScheme(
        shape.get("number", Number.INT),
        4,
        shape.get("granularity", Granularity(1, 32)),
        torch.float16,
        has_column_order=shape.get("has_column_order", False),
    )
    asked = LinearShape(
        "m", 96, 96, shape.get("dtype", torch.float32), False, scheme, shape.get("needs_rows", False)
    )
    assert reason in (CpuQuantizedLinear.unsupported_reason(asked, CPU) or "")


@needs_native
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_gguf_model_keeps_every_matrix_packed(tmp_path, is_tied: bool) -> None:
    """Embedding and head, too; logits are near those by the exact weights."""
    folder = tiny_models.make_tiny_model("llama", tmp_path, tie_word_embeddings=is_tied)
    kind = gguf.GGMLQuantizationType.Q8_0
    file = GGUFFile(gguf_files.folder_to_gguf(folder, tmp_path / "m.gguf", "llama", kind))
    asked: list[LinearShape] = []

    def choose(shape: LinearShape) -> type[CpuQuantizedLinear]:
        asked.append(shape)
        return CpuQuantizedLinear

    packed = build_model(make_context(file.hf_config, choose_quantized=choose))
    packed.load_weights(file.tensors())
    plain = build_model(make_context(file.hf_config))
    plain.load_weights(file.tensors())
    prompts = [[5, 9, 2, 700, 31] * 6, [7, 8]]
    for got, want in zip(PromptRun(packed).logits(prompts), PromptRun(plain).logits(prompts)):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
    per_layer = file.hf_config["num_hidden_layers"] * 4
    assert len(asked) == per_layer + (1 if is_tied else 2)
    assert [each.needs_rows for each in asked if each.name == "model.embed_tokens"] == [True]


@needs_native
def test_neighbours_of_different_formats_are_one_product(tmp_path) -> None:
    """As files have them that keep values finer than queries and keys."""
    folder = tiny_models.make_tiny_model("llama", tmp_path)
    kind = gguf.GGMLQuantizationType.Q8_0
    file = GGUFFile(gguf_files.folder_to_gguf(folder, tmp_path / "m.gguf", "llama", kind))
    tensors = dict(file.tensors())
    config = file.hf_config
    types = dict(config["quantization_config"]["tensor_types"])
    for name in [name for name in types if "q_proj" in name or "k_proj" in name]:
        values = gguf.dequantize(tensors[f"{name}.weight"].numpy(), kind)
        finer = gguf.quantize(values, gguf.GGMLQuantizationType.Q5_0)
        tensors[f"{name}.weight"], types[name] = torch.from_numpy(finer), "Q5_0"
    config = {**config, "quantization_config": {"quant_method": "gguf", "tensor_types": types}}
    runs = []
    for context in (
        {"choose_quantized": lambda shape: CpuQuantizedLinear},
        {},
    ):
        model = build_model(make_context(config, **context))
        model.load_weights(tensors.items())
        runs.append(PromptRun(model).logits([[5, 9, 2, 700, 31]])[0])
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-3, atol=1e-3 * float(runs[1].abs().max()))


@needs_native
@pytest.mark.parametrize(
    ("asked", "dtype", "winner"),
    [
        ({}, "float32", "cpu_quantized"),
        ({"dtype": "float32"}, "float32", "cpu_quantized"),
        ({"dtype": "bfloat16"}, "bfloat16", "cpu_quantized_bf16"),
        ({"dtype": "float32", "quantization": "dequantize"}, "float32", "dequantize"),
    ],
    ids=str,
)
def test_the_choice_is_explained(tmp_path, asked: Mapping[str, str], dtype: str, winner: str) -> None:
    folder = tiny_models.make_tiny_model("llama", tmp_path, tie_word_embeddings=True)
    kind = gguf.GGMLQuantizationType.Q4_1
    path = gguf_files.folder_to_gguf(folder, tmp_path / "m.gguf", "llama", kind)
    told = explain(EngineArgs(model=str(path), device="cpu", **asked), load_plugins())
    assert told.config.model.dtype == dtype
    assert told.config.kv_dtype == ("float16" if not asked else dtype)
    of_weights = [each for each in told.choices if each.kind == "quantized"]
    assert {each.decision.chosen.name for each in of_weights} == {winner}
    assert any("model.embed_tokens" in each.subjects for each in of_weights)
    if winner == "dequantize":
        reasons = {each.reason for each in of_weights[0].decision.candidates if each.name != winner}
        assert reasons == {"--quantization dequantize asks for plain weights"}


@needs_native
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"quantization_config": {"quant_method": "gguf"}}, "float32"),
        ({"quantization_config": {"quant_method": "gptq"}}, "float32"),
        ({"quantization_config": {"quant_method": "fp8"}}, "bfloat16"),
        ({"quantization_config": {"quant_method": "gguf"}, "num_experts": 8}, "bfloat16"),
        ({"quantization_config": {"quant_method": "gguf", "tensor_types": {"x": "Q4_K"}}}, "float32"),
        (
            {"quantization_config": {"quant_method": "gguf", "tensor_types": {"x": "Q4_K", "y": "IQ4_XS"}}},
            "bfloat16",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}}},
                }
            },
            "float32",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}},
                }
            },
            "bfloat16",
        ),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}}, "bfloat16"),
        (
            {
                "quantization_config": {
                    "quant_method": "torchao",
                    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}},
                }
            },
            "float32",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "torchao",
                    "quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_data": {}}},
                }
            },
            "bfloat16",
        ),
        ({"quantization_config": {"quant_method": "torchao", "quant_type": "int4_weight_only"}}, "bfloat16"),
    ],
    ids=str,
)
def test_activations_are_float32_where_weights_stay_packed(config: Mapping[str, Any], dtype: str) -> None:
    platform = CpuPlatform()
    defaults = platform.quantized_defaults(EngineArgs(), CPU, "bfloat16", config)
    assert defaults["dtype"] == dtype
    assert defaults.get("kv_cache_dtype") == ("float16" if dtype == "float32" else None)
    assert "kv_cache_dtype" not in platform.quantized_defaults(
        EngineArgs(dtype="float32"), CPU, "bfloat16", config
    )
    plain = platform.quantized_defaults(EngineArgs(quantization="dequantize"), CPU, "bfloat16", config)
    assert plain["dtype"] == "bfloat16"
