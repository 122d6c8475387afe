"""Weights that the libraries themselves have written, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.quantization.bitsandbytes import BitsAndBytesFormat
from inferplane.quantization.compressed_tensors import CompressedTensorsFormat
from inferplane.quantization.torchao import TorchAoFormat
from tiny_models import make_tiny_model


def weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


pytestmark = pytest.mark.slow


def by_definition(functional: Any, codes: torch.Tensor, state: Any) -> torch.Tensor:
    """Two codes a byte, the first in the high half, in blocks that lie one after another."""
    scale = state.absmax
    if state.nested:
        scale = functional.dequantize_blockwise(scale, state.state2) + state.offset
    numbers = state.code[torch.stack([codes.flatten() >> 4, codes.flatten() & 15], -1).flatten().long()]
    return (numbers * scale.repeat_interleave(state.blocksize)[: len(numbers)]).view(state.shape)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(64, 128), (24, 96)])
def test_bitsandbytes(shape: tuple[int, int], kind: str, nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(weight(*shape), quant_type=kind, compress_statistics=nested)
    if shape[1] % state.blocksize == 0:
        want = functional.dequantize_4bit(codes, state)
    else:
        # blocks go on from one row to the next, which its dequantizer for CPUs forgets
        want = by_definition(functional, codes, state)
    tensors = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    config = {
        "load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested,
    }  # fmt: skip
    matrix = BitsAndBytesFormat(config).matrix("layer", *shape)
    assert matrix is not None
    found = matrix.read({"weight": codes, **tensors})
    assert torch.equal(found.dequantize(torch.float32), want)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("layout", "args"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 16}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
        ),
    ],
    ids=str,
)
def test_compressed_tensors(layout: str, args: dict, symmetric: bool) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    if layout == "float-quantized" and not symmetric:
        pytest.skip("floating-point codes have no zero points")
    quantization = QuantizationArgs(symmetric=symmetric, **args)
    scheme = QuantizationScheme(targets=["Linear"], weights=quantization)
    rows, columns = 64, 96
    plain = weight(rows, columns)
    block_rows, block_columns = args.get("block_structure", [1, args.get("group_size", columns)])
    blocks = plain.view(rows // block_rows, block_rows, columns // block_columns, block_columns)
    scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), quantization)
    compressor = BaseCompressor.get_value_from_registry(layout)
    state = {"weight": plain, "weight_scale": scale, "weight_zero_point": zero}
    tensors = compressor.compress(state, scheme)
    want = compressor.decompress(dict(tensors), scheme)["weight"]
    group = {"targets": ["Linear"], "weights": quantization.model_dump(mode="json")}
    config = {"format": layout, "config_groups": {"group_0": group}}
    matrix = CompressedTensorsFormat(config).matrix("layer", rows, columns)
    assert matrix is not None
    wanted = {stored.suffix for stored in matrix.tensors()}
    found = matrix.read({suffix: tensor for suffix, tensor in tensors.items() if suffix in wanted})
    assert torch.equal(found.dequantize(torch.float32), want.float())


@pytest.mark.parametrize(
    "name", ["int8", "int8 dynamic", "int4", "int4 asymmetric", "int3 dynamic", "fp8", "int8 by group"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchao(name: str, dtype: torch.dtype) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    group = torchao.PerGroup(32)
    config = {
        "int8": lambda: torchao.Int8WeightOnlyConfig(version=2),
        "int8 by group": lambda: torchao.Int8WeightOnlyConfig(version=2, granularity=group),
        "int8 dynamic": lambda: torchao.Int8DynamicActivationInt8WeightConfig(version=2),
        "int4": lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group),
        "int4 asymmetric": lambda: torchao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=group, mapping_type=torchao.MappingType.ASYMMETRIC
        ),
        "int3 dynamic": lambda: torchao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int3, weight_granularity=group
        ),
        "fp8": torchao.Float8WeightOnlyConfig,
    }[name]()
    layer = torch.nn.Linear(96, 64, bias=False, dtype=dtype)
    model = torch.nn.ModuleDict({"layer": layer})
    torchao.quantize_(model, config)
    tensors, _ = flatten_tensor_state_dict(model.state_dict())
    found = TorchAoFormat({"quant_type": {"default": config_to_dict(config)}}).matrix("layer", 64, 96)
    assert found is not None
    wanted = {stored.suffix for stored in found.tensors()}
    assert {key.removeprefix("layer.") for key in tensors} <= wanted
    weight = found.read({key.removeprefix("layer."): each for key, each in tensors.items()})
    assert torch.equal(weight.dequantize(dtype), model["layer"].weight.dequantize())


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_model_that_transformers_has_quantized_by_torchao(name: str, tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = {
        "int8": lambda: torchao.Int8WeightOnlyConfig(version=2),
        "int4": lambda: torchao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=torchao.PerGroup(32)
        ),
    }[name]()
    source = make_tiny_model("llama", tmp_path)
    quantized = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=TorchAoConfig(config), dtype=torch.float32
    )
    folder = tmp_path / "quantized"
    quantized.save_pretrained(folder)
    for file in source.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    prompt = [5, 9, 2, 31, 77, 8]
    want = quantized(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    with LLM(str(folder), device="reference", dtype="float32", kv_cache_bytes=4 << 20, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=8)
        [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    found = output.outputs[0].logprobs[0].top
    assert [each.token_id for each in found] == want.topk(8).indices.tolist()
    assert [each.logprob for each in found] == pytest.approx(want.topk(8).values.tolist(), abs=1e-4)
