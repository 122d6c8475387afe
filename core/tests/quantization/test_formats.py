"""Each format against matrices that were laid out by hand: their numbers bit for bit, and models made of them."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inferplane import LLM, SamplingParams
from inferplane.api.comm import Communicator
from inferplane.api.quant import StoredMatrix
from inferplane.config import ConfigError, EngineArgs
from inferplane.models.errors import ModelLoadError
from inferplane.models.registry import build_model
from inferplane.models.weights import dummy_tensors, weight_slots
from inferplane.plugins import load_plugins
from inferplane.plugins.explanation import explain
from inferplane.quantization.mxfp4 import Mxfp4Format
from inferplane.quantization.registry import make_format
from model_harness import PromptRun, make_context, read_config, read_tensors, run_ranks
from quantized_checkpoints import (
    CASES,
    FP4,
    Case,
    awq,
    fp8,
    gptq,
    nibbles,
    quark,
)
from tiny_models import make_tiny_model

PROMPTS = [[5, 9, 2, 31, 77, 8], [7, 1]]


def matrix_of(case: Case, out_features: int, in_features: int) -> StoredMatrix:
    config = {"architectures": ["X"], "vocab_size": 8, "quantization_config": case.config}
    found = make_format(make_context(config).config, {})
    assert found is not None
    matrix = found.matrix("layer", out_features, in_features)
    assert matrix is not None
    return matrix


def stored(
    case: Case, name: str, out_features: int, in_features: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return case.write(np.random.default_rng(zlib.crc32(name.encode())), out_features, in_features)


def by_suffix(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {suffix.removeprefix("."): tensor for suffix, tensor in tensors.items()}


@pytest.mark.parametrize("name", CASES)
def test_numbers_bit_for_bit(name: str) -> None:
    case = CASES[name]
    tensors, want = stored(case, name, 64, 96)
    weight = matrix_of(case, 64, 96).read(by_suffix(tensors))
    assert torch.equal(weight.dequantize(torch.float32), want)
    assert torch.equal(weight.dequantize(torch.float16), want.half())


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_last_group_that_is_cut_short(bits: int, sym: bool) -> None:
    case = gptq(bits, 64, sym=sym)
    tensors, want = stored(case, "tail", 64, 96)
    weight = matrix_of(case, 64, 96).read(by_suffix(tensors))
    assert weight.scale.shape == (64, 2)
    assert torch.equal(weight.dequantize(torch.float32), want)


def test_zero_points_of_three_conventions() -> None:
    """The same matrix with zero points 0 and 15 among them, as AWQ and as both versions of GPTQ."""
    found = []
    for case in (gptq(sym=False), gptq(sym=False, version=2)):
        tensors, want = stored(case, "alike", 64, 96)
        found.append(matrix_of(case, 64, 96).read(by_suffix(tensors)).dequantize(torch.float32))
        assert torch.equal(found[-1], want)
    assert torch.equal(found[0], found[1])
    tensors, want = stored(awq(), "zeros", 64, 96)
    weight = matrix_of(awq(), 64, 96).read(by_suffix(tensors))
    assert weight.zero is not None and {-8, 7} <= set(weight.zero.flatten().tolist())
    assert torch.equal(weight.dequantize(torch.float32), want)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), intermediate_size=128)


def checkpoint(folder: Path, case: Case) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The model with every matrix of its layers stored as the case does, and with the same numbers plain."""
    quantized, plain = {}, {}
    for name, tensor in read_tensors(folder):
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            quantized[name] = plain[name] = tensor
            continue
        parts, plain[name] = stored(case, layer, *tensor.shape)
        quantized.update({layer + suffix: part for suffix, part in parts.items()})
    return quantized, plain


def logits_of(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], comm: Communicator | None = None
) -> list[torch.Tensor]:
    model = build_model(make_context(config, comm=comm))
    model.load_weights(tensors.items())
    return PromptRun(model).logits(PROMPTS)


@pytest.mark.parametrize("name", CASES)
def test_a_model_on_one_rank_and_two(folder: Path, name: str) -> None:
    config = read_config(folder)
    quantized, plain = checkpoint(folder, CASES[name])
    quantized_config = {**config, "quantization_config": CASES[name].config}
    quantized = {key: tensor for key, tensor in quantized.items() if not _is_record(CASES[name], key)}
    want = logits_of(config, plain)
    got = logits_of(quantized_config, quantized)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(got, want))
    for logits in run_ranks(2, lambda comm: logits_of(quantized_config, quantized, comm)):
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in zip(logits, want))


def _is_record(case: Case, name: str) -> bool:
    """What a model's loader leaves out before it comes to the layers."""
    is_static = case.config.get("activation_scheme") == "static"
    return name.endswith(".input_scale") and not is_static


def write_folder(source: Path, path: Path, case: Case, tensors: Mapping[str, torch.Tensor]) -> Path:
    path.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": dict(case.config)}))
    save_file(
        {key: tensor.contiguous().clone() for key, tensor in tensors.items()}, path / "model.safetensors"
    )
    return path


def generate(path: Path, **settings: Any) -> list[int]:
    settings = {"device": "reference", "kv_cache_bytes": 4 << 20, "max_num_seqs": 4, **settings}
    with LLM(str(path), **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        [output] = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
        return output.outputs[0].token_ids


@pytest.mark.parametrize("name", ["gptq-4-order", "awq", "fp8-block", "fp8-static", "modelopt-nvfp4"])
def test_through_the_engine(folder: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    quantized, plain = checkpoint(folder, case)
    records = {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)} if name.startswith("fp8") else {}
    path = write_folder(folder, tmp_path / "q", case, {**quantized, **records})
    want = logits_of(read_config(folder), plain)[0][-1].argmax().item()
    assert generate(path)[0] == want
    args = EngineArgs(model=str(path), device="reference")
    layers = [choice for choice in explain(args, load_plugins()).choices if choice.kind == "quantized"]
    assert {choice.decision.chosen.name for choice in layers} == {"dequantize"}
    assert len(generate(path, load_format="dummy")) == 4


def test_layers_that_are_left_plain(folder: Path) -> None:
    config, (quantized, plain) = read_config(folder), checkpoint(folder, awq())
    skipped = "model.layers.1.mlp"
    mixed = {key: tensor for key, tensor in quantized.items() if not key.startswith(skipped)}
    mixed.update({key: tensor for key, tensor in plain.items() if key.startswith(skipped)})
    awq_config = {**awq().config, "modules_to_not_convert": ["1.mlp", "up_pro"]}
    got = logits_of({**config, "quantization_config": awq_config}, mixed)
    assert torch.allclose(got[0], logits_of(config, plain)[0], atol=1e-4)


def test_settings_of_single_layers(folder: Path) -> None:
    config = read_config(folder)
    eight, four = gptq(8, 16), gptq()
    quantized, plain = {}, {}
    for part, case in ((".down_proj", eight), ("", four)):
        for found, into in zip(checkpoint(folder, case), (quantized, plain)):
            into.update({key: t for key, t in found.items() if part in key and key not in into})
    quantized = {
        key: tensor
        for key, tensor in quantized.items()
        if not key.startswith("model.layers.0.self_attn.o_proj")
    }
    quantized["model.layers.0.self_attn.o_proj.weight"] = plain["model.layers.0.self_attn.o_proj.weight"]
    rules = {"+:.*down_proj": {"bits": 8, "group_size": 16}, r"-:model\.layers\.0\..*o_proj": {}}
    got = logits_of({**config, "quantization_config": {**four.config, "dynamic": rules}}, quantized)
    assert torch.allclose(got[0], logits_of(config, plain)[0], atol=1e-4)


def test_experts_of_separate_matrices(tmp_path: Path) -> None:
    folder = make_tiny_model("qwen3_moe", tmp_path, moe_intermediate_size=64)
    config, case = read_config(folder), fp8(block=(32, 32))
    quantized, plain = checkpoint(folder, case)
    assert any(".experts.3.up_proj.weight_scale_inv" in name for name in quantized)
    got = logits_of({**config, "quantization_config": case.config}, quantized)
    assert torch.allclose(got[0], logits_of(config, plain)[0], atol=1e-4)


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": []}


def test_experts_in_four_bits(tiny_model: Callable[[str], Path]) -> None:
    """As GPT-OSS ships them; transformers says what they mean."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = tiny_model("gpt_oss")
    config, rng = read_config(folder), np.random.default_rng(5)
    quantized, plain = {}, {}
    for name, tensor in read_tensors(folder):
        quantized[name] = plain[name] = tensor
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            blocks = torch.from_numpy(
                rng.integers(0, 256, (experts, rows, columns // 32, 16)).astype(np.uint8)
            )
            scales = torch.from_numpy(rng.integers(118, 124, (experts, rows, columns // 32)).astype(np.uint8))
            del quantized[name]
            quantized[f"{name}_blocks"], quantized[f"{name}_scales"] = blocks, scales
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            codes = np.stack([blocks.numpy() & 15, blocks.numpy() >> 4], -1).reshape(experts, rows, columns)
            by_hand = FP4[codes] * np.exp2(scales.numpy() - 127.0).repeat(32, 2)
            assert torch.equal(plain[name], torch.from_numpy(by_hand).float().transpose(1, 2))
    method = {**config, "quantization_config": MXFP4}
    want = logits_of(config, plain)
    assert torch.allclose(logits_of(method, quantized)[0], want[0], atol=1e-4)
    for logits in run_ranks(2, lambda comm: logits_of(method, quantized, comm)):
        assert torch.allclose(logits[0], want[0], atol=1e-3)
    assert Mxfp4Format({}).matrix("layer", 8, 32) is None


def test_experts_in_four_bits_that_are_drawn(tiny_model: Callable[[str], Path]) -> None:
    model = build_model(make_context({**read_config(tiny_model("gpt_oss")), "quantization_config": MXFP4}))
    model.load_weights(dummy_tensors(weight_slots(model)))
    assert PromptRun(model).logits(PROMPTS)[0].isfinite().all()


def test_experts_with_a_scale_that_is_no_number(tiny_model: Callable[[str], Path]) -> None:
    model = build_model(make_context({**read_config(tiny_model("gpt_oss")), "quantization_config": MXFP4}))
    tensors = dict(dummy_tensors(weight_slots(model)))
    name = next(name for name in tensors if name.endswith("_scales"))
    tensors[name].view(torch.uint8)[1, 2, 0] = 255
    experts = name.removesuffix("_scales")
    with pytest.raises(ModelLoadError, match=rf"{re.escape(experts)} \[.*a scale in e8m0 is 255"):
        model.load_weights(tensors.items())


def test_an_impossible_shard(folder: Path) -> None:
    config, case = read_config(folder), gptq(size=48)
    quantized, _ = checkpoint(folder, case)
    method = {**config, "quantization_config": case.config}
    message = (
        r"model.layers.0.self_attn.o_proj \[64, 64\] over 2 ranks: columns 0 to 32 of 64 cut a group of 48"
    )
    with pytest.raises(ModelLoadError, match=message):
        run_ranks(2, lambda comm: logits_of(method, quantized, comm))


def test_one_product_of_two_kinds(folder: Path) -> None:
    method = {
        **read_config(folder),
        "quantization_config": {**awq().config, "modules_to_not_convert": ["q_proj"]},
    }
    with pytest.raises(ModelLoadError, match=r"k_proj.* and model.layers.0.self_attn.q_proj are one product"):
        logits_of(method, {})


def test_a_missing_scale(folder: Path) -> None:
    quantized, _ = checkpoint(folder, awq())
    del quantized["model.layers.1.mlp.up_proj.scales"]
    method = {**read_config(folder), "quantization_config": awq().config}
    with pytest.raises(ModelLoadError, match=r"missing: model.layers.1.mlp.up_proj.scales"):
        logits_of(method, quantized)


def test_symmetric_codes_without_a_sign_need_zero_points(folder: Path) -> None:
    """7 or 8, which only they say."""
    case = quark("uint4", 32, zero_points="none")
    quantized, _ = checkpoint(folder, case)
    method = {**read_config(folder), "quantization_config": case.config}
    with pytest.raises(ModelLoadError, match=r"missing: .*proj.weight_zero_point"):
        logits_of(method, quantized)


CT = CASES["ct-w4-group"].config


def _with_weights(**changes: Any) -> dict[str, Any]:
    group = CT["config_groups"]["group_0"]
    return {**CT, "config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


def _quark(**changes: Any) -> dict[str, Any]:
    weight = {"dtype": "int4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32, **changes}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 5, "group_size": 8}, "bits should be 2, 3, 4 or 8, but is 5"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 0},
            "group_size should be -1 or a number of columns",
        ),
        ({"quant_method": "gptq", "bits": 4}, "group_size should be .* but is None"),
        ({**gptq().config, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not known"),
        ({**gptq().config, "lm_head": True}, "lm_head is quantized"),
        ({**gptq().config, "dynamic": {"+:(": {}}}, "is no regular expression"),
        ({**awq().config, "bits": 8}, "bits should be 4, but is 8"),
        ({**awq().config, "version": "gemv"}, "version 'gemv' lays weights out"),
        ({**awq(48).config}, r"q_proj \[64, 64\].*in_features 64 are no whole number of groups of 48"),
        (
            {**awq().config, "modules_to_not_convert": "lm_head"},
            "should be a list of names, but is 'lm_head'",
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "lazy"},
            "activation_scheme should be static or dynamic",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size should be two numbers"),
        ({**CT, "config_groups": {}}, "config_groups should be a table of schemes"),
        ({**CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, "stored as sparse are not read"),
        ({**CT, "format": "marlin-24"}, "format 'marlin-24' is not read"),
        (_with_weights(num_bits=5), "int of 5 bits is not read"),
        (_with_weights(strategy="odd"), "strategy 'odd' with group_size 32"),
        (_with_weights(group_size=24), "in_features 64 are no whole number of groups of 24"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit nor load_in_8bit is true"),
        (
            {"quant_method": "modelopt", "quant_algo": "INT4"},
            "quant_algo 'INT4' is not read; FP8, .* and NVFP4 are",
        ),
        ({"quant_method": "quark"}, "global_quant_config should be a table with weight, but is None"),
        (_quark(dtype="fp6_e3m2"), "global_quant_config.weight: fp6_e3m2 per_group with group_size 32"),
        (_quark(zero_point_type="float32"), "zero_point_type float32 is not read"),
        (_quark(group_size=48), r"q_proj \[64, 64\].*in_features 64 are no whole number of groups of 48"),
        (
            {**_quark(), "export": {"pack_method": "other"}},
            "pack_method 'other' is not read; reorder and order are",
        ),
        ({**_quark(), "layer_type_quant_config": {"Linear": {}}}, "settings by type of layer are not read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_means_nothing_is_refused(folder: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        build_model(make_context({**read_config(folder), "quantization_config": config}))


def test_an_unknown_method(folder: Path, tmp_path: Path) -> None:
    path = write_folder(
        folder, tmp_path / "q", Case({"quant_method": "quip"}, awq().write), {"x": torch.ones(1)}
    )
    with pytest.raises(
        ModelLoadError, match=r"quant_method 'quip' is none that can be read; there are awq, bits"
    ):
        generate(path)
    path = write_folder(folder, tmp_path / "p", awq(), {"x": torch.ones(1)})
    with pytest.raises(
        ConfigError, match="--quantization is fp8, but the checkpoint is quantized already, as awq"
    ):
        generate(path, quantization="fp8")


def test_a_column_in_a_group_that_is_not_there() -> None:
    case = gptq(order=True)
    tensors, _ = stored(case, "x", 64, 96)
    tensors[".g_idx"][7] = 3
    with pytest.raises(ValueError, match="g_idx names groups 0 to 3, but there are 3"):
        matrix_of(case, 64, 96).read(by_suffix(tensors))


def bitsandbytes_matrix(
    weight_shape: tuple[int, int], kind: str, *, nested: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Laid out by hand: flat blocks of 64, the first of two codes in the high half of a byte."""
    rng, (out, columns) = np.random.default_rng(2), weight_shape
    table = rng.permutation(np.linspace(-1, 1, 16)).astype(np.float32)
    codes = rng.integers(0, 16, (out, columns))
    num_blocks = -(-out * columns // 64)
    state = {"blocksize": 64, "quant_type": kind, "dtype": "float16", "shape": [out, columns]}
    tensors = {"weight.quant_map": torch.from_numpy(table)}
    if nested:
        inner, outer = rng.integers(0, 256, num_blocks), rng.uniform(0.1, 0.2, -(-num_blocks // 256))
        inner_table = np.linspace(-1, 1, 256).astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_offset": 0.25, "nested_dtype": "float32"}
        tensors["weight.absmax"] = torch.from_numpy(inner.astype(np.uint8))
        tensors["weight.nested_absmax"] = torch.from_numpy(outer.astype(np.float32))
        tensors["weight.nested_quant_map"] = torch.from_numpy(inner_table)
        scale = inner_table[inner] * outer.astype(np.float32).repeat(256)[:num_blocks] + np.float32(0.25)
    else:
        scale = rng.uniform(0.1, 0.2, num_blocks).astype(np.float32)
        tensors["weight.absmax"] = torch.from_numpy(scale)
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    tensors["weight"] = torch.from_numpy(nibbles(codes, high_first=True).reshape(-1, 1))
    want = table[codes].ravel() * scale.repeat(64)[: out * columns]
    return tensors, torch.from_numpy(want.reshape(out, columns))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(64, 128), (6, 96), (5, 6), (200, 192)], ids=str)
def test_blocks_of_bitsandbytes(shape: tuple[int, int], kind: str, nested: bool) -> None:
    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
    }  # fmt: skip
    tensors, want = bitsandbytes_matrix(shape, kind, nested=nested)
    matrix = matrix_of(Case(config, awq().write), *shape)
    assert torch.equal(matrix.read(tensors).dequantize(torch.float32), want)
    del tensors["weight.absmax"]
    tensors["weight.absmax"] = torch.zeros(1000)
    with pytest.raises(ValueError, match=r"layer .*absmax has 1000 numbers"):
        matrix.read(tensors)


def test_int8_of_bitsandbytes() -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(-127, 128, (8, 16)).astype(np.int8)
    largest = rng.uniform(1, 3, 8).astype(np.float32)
    case = Case({"quant_method": "bitsandbytes", "load_in_8bit": True}, awq().write)
    weight = matrix_of(case, 8, 16).read(
        {"weight": torch.from_numpy(codes), "SCB": torch.from_numpy(largest)}
    )
    want = codes * (largest * np.float32(1 / 127))[:, None]
    assert torch.equal(weight.dequantize(torch.float32), torch.from_numpy(want))
