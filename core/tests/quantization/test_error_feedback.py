"""Rounding with error feedback: what it is for, and where it may change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inferplane.models.errors import ModelLoadError
from inferplane.quantization.error_feedback import round_with_feedback
from inferplane.quantization.rounding import INT4_GROUPS, MXFP4, round_to, with_columns
from model_harness import PromptRun, load_tiny
from tiny_models import make_tiny_model

PROMPTS = [[5, 9, 2, 31, 77, 8], [7, 1]]
SCHEMES = {"int4": with_columns(INT4_GROUPS, 32), "mxfp4": MXFP4}


@pytest.mark.parametrize("name", SCHEMES)
def test_products_with_inputs_like_the_samples_err_less(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(24, 192, generator=generator)
    samples, others = (
        torch.randn(rows, 24, generator=generator) @ mixing
        + 0.1 * torch.randn(rows, 192, generator=generator)
        for rows in (400, 100)
    )
    weight = torch.randn(40, 192, generator=generator)
    fed_back = round_with_feedback(weight, SCHEMES[name], samples.T @ samples)
    errors = [
        (others @ (rounded.dequantize(torch.float32) - weight).T).square().mean()
        for rounded in (fed_back, round_to(weight, SCHEMES[name]))
    ]
    assert errors[0] < 0.25 * errors[1]


@pytest.mark.parametrize("name", SCHEMES)
def test_inputs_that_are_independent_leave_nothing_to_make_up_for(name: str) -> None:
    weight = torch.randn(8, 160, generator=torch.Generator().manual_seed(0))
    found = round_with_feedback(weight, SCHEMES[name], 3.0 * torch.eye(160))
    want = round_to(weight, SCHEMES[name])
    assert torch.equal(found.codes, want.codes)
    assert torch.equal(found.scale.float(), want.scale.float())


def quantize(source: Path, out: Path, *more: str) -> None:
    from click.testing import CliRunner

    from inferplane.cli.main import cli

    result = CliRunner().invoke(cli, ["quantize", str(source), "--out", str(out), *more])
    if result.exception is not None:
        raise result.exception


@pytest.mark.parametrize("arch", ["llama", "gpt_neox", "glm4"])
def test_whole_models(arch: str, tmp_path: Path) -> None:
    """Fused, interleaved and separate matrices: each finds its rows again in the checkpoint."""
    source = make_tiny_model(arch, tmp_path, intermediate_size=128)
    plain = PromptRun(load_tiny(source)).logits(PROMPTS)
    distances = []
    for name, more in (("nearest", ()), ("feedback", ("--error-feedback",))):
        quantize(source, tmp_path / name, "--scheme", "int4", "--group-size", "32", *more)
        found = PromptRun(load_tiny(tmp_path / name)).logits(PROMPTS)
        distances.append(sum(float((a - b).square().mean()) for a, b in zip(found, plain)))
    assert distances[1] < 1.3 * distances[0]


def test_what_cannot_be(tmp_path: Path) -> None:
    source = make_tiny_model("llama", tmp_path, intermediate_size=128)
    with pytest.raises(ModelLoadError, match="calibration is for schemes with groups, not for fp8_e4m3"):
        quantize(source, tmp_path / "a", "--scheme", "fp8", "--error-feedback")
    text = tmp_path / "short.txt"
    text.write_text("No.")
    short = ("--scheme", "mxfp4", "--error-feedback", "--calibration-text", str(text))
    with pytest.raises(ModelLoadError, match=r"the calibration text has \d tokens, and should have 16"):
        quantize(source, tmp_path / "a", *short)
