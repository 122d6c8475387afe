"""``inferplane quantize``: what it writes is what was rounded, for us and for the library whose format it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from inferplane import LLM, SamplingParams
from inferplane.cli.main import cli
from inferplane.models.errors import ModelLoadError
from inferplane.models.registry import build_model
from inferplane.quantization import writer
from inferplane.quantization.calibration import SEQUENCE_TOKENS
from inferplane.quantization.rounding import round_to
from inferplane.quantization.writer import scheme_named
from model_harness import PromptRun, load_tiny, make_context, read_config, read_tensors
from tiny_models import make_tiny_model

PROMPTS = [[5, 9, 2, 31, 77, 8], [7, 1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), intermediate_size=128)


def run(*words: str) -> str:
    result = CliRunner().invoke(cli, ["quantize", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(("scheme", "group"), [("fp8", None), ("int8", None), ("int4", 32), ("mxfp4", None)])
def test_what_is_read_is_what_was_rounded(
    folder: Path, tmp_path: Path, scheme: str, group: int | None
) -> None:
    out = tmp_path / "out"
    size = [] if group is None else ["--group-size", str(group)]
    report = run(str(folder), "--scheme", scheme, "--out", str(out), "--json", *size)
    facts = json.loads(report.splitlines()[-1])
    assert facts["num_matrices"] == 14 and facts["bytes_after"] < facts["bytes_before"]
    found = scheme_named(scheme, group)
    model = build_model(make_context(read_config(folder)))
    model.load_weights(
        (name, round_to(tensor, found).dequantize(torch.float32) if "_proj." in name else tensor)
        for name, tensor in read_tensors(folder)
    )
    want = PromptRun(model).logits(PROMPTS)
    got = PromptRun(load_tiny(out)).logits(PROMPTS)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want))
    assert {file.name for file in folder.iterdir()} == {file.name for file in out.iterdir()}


def test_several_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_SHARD_BYTES", 100_000)
    out = tmp_path / "out"
    assert "14 matrices as int8" in run(str(folder), "--scheme", "int8", "--out", str(out))
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(files) > 1 and sorted(set(index.values())) == files
    assert all(index[name] == file for file in files for name in load_file(out / file))


def test_experts_and_what_stays_plain(tmp_path: Path) -> None:
    source = make_tiny_model("qwen3_moe", tmp_path / "source", moe_intermediate_size=64)
    out = tmp_path / "out"
    run(str(source), "--scheme", "int8", "--out", str(out))
    names = load_file(out / "model.safetensors").keys()
    assert any(".experts.0.up_proj.weight_scale" in name for name in names)
    assert not any("gate.weight_scale" in name or "lm_head.weight_scale" in name for name in names)
    plain = PromptRun(load_tiny(source)).logits(PROMPTS)[0]
    assert (PromptRun(load_tiny(out)).logits(PROMPTS)[0] - plain).abs().max() < 0.2 * plain.abs().max()


def test_scales_of_keys_and_values(folder: Path, tmp_path: Path) -> None:
    """Against the largest keys and values that transformers keeps of the same text."""
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text(" ".join(f"word{number}" for number in range(40)))
    run(str(folder), "--scheme", "fp8", "--out", str(out), "--kv-scales", "--calibration-text", str(text))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["num_bits"] == 8
    tensors = load_file(out / "model.safetensors")
    ids = AutoTokenizer.from_pretrained(folder)(text.read_text())["input_ids"][:SEQUENCE_TOKENS]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cache = plain(torch.tensor([ids]), use_cache=True).past_key_values
    for index, layer in enumerate(cache.layers):
        for part, kept in (("k", layer.keys), ("v", layer.values)):
            [scale] = tensors[f"model.layers.{index}.self_attn.{part}_scale"].tolist()
            assert scale == pytest.approx(kept.abs().max().item() / 448, rel=1e-4)
    settings = {"device": "reference", "kv_cache_bytes": 4 << 20, "max_num_seqs": 4}
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with LLM(str(out), kv_cache_dtype="fp8_e4m3", **settings) as llm:
        [output] = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1


def test_what_cannot_be(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"down_proj|q_proj.*its columns are no whole number of groups of 48"
    ):
        run(str(folder), "--scheme", "int4", "--group-size", "48", "--out", str(tmp_path / "a"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModelLoadError, match="--group-size is for --scheme int4"):
        run(str(folder), "--scheme", "fp8", "--group-size", "32", "--out", str(tmp_path / "a"))
    with pytest.raises(ModelLoadError, match="is there already"):
        run(str(folder), "--scheme", "fp8", "--out", str(tmp_path))
    out = tmp_path / "b"
    run(str(folder), "--scheme", "fp8", "--out", str(out))
    with pytest.raises(ModelLoadError, match="only a folder of plain weights can be quantized"):
        run(str(out), "--scheme", "int8", "--out", str(tmp_path / "c"))
