"""Matrices that the tools of quantization have written themselves, with what the tools make of them again.

    python tests/support/written_by_tools.py gptqmodel    writes gptqmodel-* to core/tests/quantization/written

Each tool quantizes a tiny model of two layers on a CPU and saves it. Of one matrix the stored tensors are kept, the
``quantization_config`` of the model, and, as ``dequantized``, the same matrix from the tool's own dequantizer. A tool
has to be installed; their needs disagree, so that each may want an environment of its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from repository import ROOT
from tiny_models import make_tiny_model

FOLDER = ROOT / "core" / "tests" / "quantization" / "written"
MATRIX = "model.layers.0.self_attn.k_proj"
"""``[32, 64]`` of the tiny model."""
Dequantize = Callable[[dict[str, torch.Tensor]], torch.Tensor]
Written = tuple[str, Path, Dequantize]
"""A name, the checkpoint's folder, and the tool's dequantizer of a matrix's tensors by suffix: ``[out, in]``."""


def _prompts(count: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(0, 100, (1, 64), generator=random) for _ in range(count)]


def gptqmodel(plain: Path, out: Path) -> Iterator[Written]:
    # it starts fewer threads than it asks for where there are two processors
    os.cpu_count = lambda: 8  # type: ignore[assignment]
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    cases = {
        "4": {"bits": 4},
        "4-order": {"bits": 4, "desc_act": True},
        "4-asymmetric": {"bits": 4, "sym": False},
        "4-asymmetric-v2-order": {"bits": 4, "sym": False, "desc_act": True, "format": "gptq_v2"},
        "2": {"bits": 2},
        "3": {"bits": 3},
        "3-asymmetric-order": {"bits": 3, "sym": False, "desc_act": True},
        "8-asymmetric": {"bits": 8, "sym": False},
    }
    for name, settings in cases.items():
        order = settings.setdefault("desc_act", False)
        config = QuantizeConfig(group_size=32, act_group_aware=False, **settings)
        model = GPTQModel.load(str(plain), config, device="cpu")
        text = [{"input_ids": ids[0].tolist(), "attention_mask": [1] * 64} for ids in _prompts(16)]
        model.quantize(text, batch_size=1)
        folder = out / name
        model.save(str(folder))
        # the type that scales are stored in, to which they would be rounded else
        loaded = GPTQModel.load(str(folder), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16)
        matrix = loaded.model.get_submodule(MATRIX)
        if order:
            assert not torch.equal(matrix.g_idx.sort().values, matrix.g_idx), "the order should differ"
        dequantized = matrix.dequantize_weight().T
        yield name, folder, lambda tensors, found=dequantized: found


def awq(plain: Path, out: Path) -> Iterator[Written]:
    from awq import AutoAWQForCausalLM
    from awq.utils.packing_utils import dequantize_gemm
    from transformers import AutoTokenizer

    model = AutoAWQForCausalLM.from_pretrained(
        str(plain), device_map="cpu", torch_dtype="float16", safetensors=True
    )
    text = "the dog and the cat looked at a small house near the river; " * 4
    config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    tokenizer = AutoTokenizer.from_pretrained(plain)
    model.quantize(tokenizer, quant_config=config, calib_data=[text] * 16, apply_clip=False)
    folder = out / "gemm"
    model.save_quantized(str(folder))
    yield "gemm", folder, lambda t: dequantize_gemm(t["qweight"], t["qzeros"], t["scales"], 4, 32).T


def modelopt(plain: Path, out: Path) -> Iterator[Written]:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
    from transformers import AutoModelForCausalLM

    shape, dtype = (32, 64), torch.float32

    def nvfp4(t: dict[str, torch.Tensor]) -> torch.Tensor:
        found = NVFP4QTensor(shape, dtype, t["weight"])
        return found.dequantize(
            scale=t["weight_scale"], double_scale=t["weight_scale_2"], block_sizes={-1: 16}
        )

    def by_channel(t: dict[str, torch.Tensor]) -> torch.Tensor:
        return FP8QTensor(shape, dtype, t["weight"]).dequantize(scale=t["weight_scale"][:, None])

    cases: dict[str, tuple[str, Dequantize]] = {
        "fp8": (
            "FP8_DEFAULT_CFG",
            lambda t: FP8QTensor(shape, dtype, t["weight"]).dequantize(scale=t["weight_scale"]),
        ),
        "fp8-channel": ("FP8_PER_CHANNEL_PER_TOKEN_CFG", by_channel),
        "mxfp8": (
            "MXFP8_DEFAULT_CFG",
            lambda t: MXFP8QTensor(shape, dtype, t["weight"]).dequantize(scale=t["weight_scale"]),
        ),
        "nvfp4": ("NVFP4_DEFAULT_CFG", nvfp4),
    }
    for name, (config, dequantize) in cases.items():
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        mtq.quantize(model, getattr(mtq, config), lambda model: [model(ids) for ids in _prompts(4)])
        folder = out / name
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=folder)
        yield name, folder, dequantize


def quark(plain: Path, out: Path) -> Iterator[Written]:
    from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
    from quark.torch.quantization.config import config as specs
    from transformers import AutoModelForCausalLM

    by_group = {"ch_axis": -1, "group_size": 32}
    by_tensor = {"observer_method": "min_max", "is_dynamic": False}
    fp8 = specs.FP8E4M3PerTensorSpec(**by_tensor)
    cases = {
        "int4": specs.Int4PerGroupSpec(**by_group),
        "uint4": specs.Uint4PerGroupSpec(**by_group),
        "int8": specs.Int8PerTensorSpec(
            **by_tensor, symmetric=True, scale_type="float", round_method="half_even"
        ),
        "fp8": fp8,
        "fp8-channel": specs.FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0),
        "mxfp4": specs.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
    }
    for name, spec in cases.items():
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        activations = fp8.to_quantization_spec() if name == "fp8" else None
        layer = specs.QLayerConfig(weight=spec.to_quantization_spec(), input_tensors=activations)
        quantizer = ModelQuantizer(specs.QConfig(global_quant_config=layer, exclude=["lm_head"]))
        model = quantizer.freeze(quantizer.quantize_model(model, _prompts(4)))
        folder = out / name
        with torch.no_grad():
            export_safetensors(model, str(folder))
            skeleton = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
            matrix = import_model_from_safetensors(skeleton, str(folder)).get_submodule(MATRIX)
            dequantized = matrix.weight_quantizer(matrix.weight).detach()
        yield name, folder, lambda tensors, found=dequantized: found


def compressed_tensors(plain: Path, out: Path) -> Iterator[Written]:
    from compressed_tensors.compressors import BaseCompressor, ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from transformers import AutoModelForCausalLM

    layouts = {"MXFP4": "mxfp4-pack-quantized", "MXFP8": "mxfp8-quantized", "NVFP4": "nvfp4-pack-quantized"}
    for preset, layout in layouts.items():
        scheme = preset_name_to_scheme(preset, ["Linear"])
        config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=layout)
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        apply_quantization_config(model, config)
        for module in model.modules():
            if not hasattr(module, "weight_scale"):
                continue
            of_all = generate_gparam(*module.weight.aminmax()) if preset == "NVFP4" else None
            groups = module.weight.unflatten(1, (-1, scheme.weights.group_size))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, of_all)
            module.weight_scale.data = scale.float()
            if of_all is not None:
                module.weight_global_scale.data = of_all.reshape(1)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        folder = out / preset.lower()
        model.save_pretrained(folder)
        compressor.update_config(str(folder))
        codec = BaseCompressor.get_value_from_registry(layout)
        yield (
            preset.lower(),
            folder,
            lambda t, codec=codec, scheme=scheme: codec.decompress(t, scheme)["weight"],
        )


TOOLS = {
    "autoawq": awq,
    "compressed-tensors": compressed_tensors,
    "gptqmodel": gptqmodel,
    "amd-quark": quark,
    "nvidia-modelopt": modelopt,
}
"""By the name of the distribution."""


def write(tool: str, folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        plain = make_tiny_model("llama", Path(scratch), intermediate_size=128)
        for name, checkpoint, dequantize in TOOLS[tool](plain, Path(scratch)):
            config = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
            tensors: dict[str, Any] = {}
            for file in checkpoint.glob("*.safetensors"):
                tensors.update(load_file(file))
            prefix = MATRIX + "."
            mine = {key.removeprefix(prefix): each for key, each in tensors.items() if key.startswith(prefix)}
            want = dequantize(dict(mine)).detach().contiguous()
            metadata = {"writer": f"{tool} {version(tool)}", "quantization_config": json.dumps(config)}
            path = folder / f"{tool}-{name}.safetensors"
            save_file({**mine, "dequantized": want}, path, metadata)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        write(each)
