"""``--quantization`` from the configuration to the logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.api.comm import Communicator
from inferplane.api.linear import LinearShape, Multiply
from inferplane.api.quant import QuantFormat, QuantizedLinearKernel, QuantizedWeight
from inferplane.config import ConfigError
from inferplane.models.registry import build_model
from inferplane.quantization.online import OnlineFp8, OnlineInt4, OnlineInt8, OnlineMxfp4
from model_harness import PromptRun, load_tiny, make_context, read_config, read_tensors, run_ranks

PROMPTS = [[5, 9, 2, 31, 77, 8], [7, 1]]


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


def rounded(online: QuantFormat, name: str, tensor: torch.Tensor) -> torch.Tensor:
    matrix = online.matrix(name, *tensor.shape)
    assert matrix is not None
    return matrix.read({"weight": tensor}).dequantize(torch.float32)


def quantized_by_hand(folder: Path, online: QuantFormat) -> list[torch.Tensor]:
    """The model as it is, but with each matrix of a layer rounded and widened again beforehand."""
    model = build_model(make_context(read_config(folder)))
    tensors = (
        (name, rounded(online, name, tensor) if "_proj." in name else tensor)
        for name, tensor in read_tensors(folder)
    )
    model.load_weights(tensors)
    return PromptRun(model).logits(PROMPTS)


@pytest.mark.parametrize(
    ("online", "groups"),
    [(OnlineFp8({}), {None}), (OnlineInt8({}), {None}), (OnlineInt4({}), {64, 32}), (OnlineMxfp4({}), {32})],
    ids=["fp8", "int8", "int4", "mxfp4"],
)
def test_every_matrix_of_a_layer_is_rounded(folder: Path, online: Any, groups: set[int | None]) -> None:
    seen: list[LinearShape] = []

    class Noted(QuantizedLinearKernel):
        name = "noted"

        @classmethod
        def unsupported_reason(cls, shape: LinearShape, device: object) -> str | None:
            return None

        @classmethod
        def prepare(cls, weight: QuantizedWeight, bias: torch.Tensor | None) -> Multiply:
            wide = weight.dequantize(torch.float32)
            return lambda x: torch.nn.functional.linear(x, wide, bias)

    def choose(shape: LinearShape) -> type[QuantizedLinearKernel]:
        seen.append(shape)
        return Noted

    want = quantized_by_hand(folder, online)
    for kernels in ({"choose_quantized": choose}, {}):
        got = PromptRun(load_tiny(folder, quantization=online, **kernels)).logits(PROMPTS)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want))
    schemes = {shape.scheme for shape in seen}
    assert len(seen) == 8 and {scheme.granularity.columns for scheme in schemes} == groups
    assert {scheme.number for scheme in schemes} == {online.scheme.number}
    plain = PromptRun(load_tiny(folder)).logits(PROMPTS)
    assert not torch.allclose(plain[0], want[0], atol=1e-3)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_ranks_round_alike(tiny_model: Callable[[str], Path], arch: str) -> None:
    folder = tiny_model(arch)
    whole = PromptRun(load_tiny(folder, quantization=OnlineFp8({}))).logits(PROMPTS)

    def work(comm: Communicator) -> list[torch.Tensor]:
        return PromptRun(load_tiny(folder, quantization=OnlineFp8({}), comm=comm)).logits(PROMPTS)

    for logits in run_ranks(2, work):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(logits, whole))


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def generate(folder: Path, **settings: object) -> list[int]:
    with LLM(str(folder), device="reference", kv_cache_bytes=4 << 20, max_num_seqs=4, **settings) as llm:  # type: ignore[arg-type]
        [output] = llm.generate([{"prompt_token_ids": PROMPTS[0]}], GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids


def test_through_the_engine(folder: Path) -> None:
    want = quantized_by_hand(folder, OnlineInt8({}))[0][-1].argmax().item()
    assert generate(folder, quantization="int8")[0] == want
    assert len(generate(folder, quantization="fp8", load_format="dummy")) == 6


def test_an_unknown_way(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="--quantization 'int5' is none that can be read; there are fp8, int4, int8, mxfp4"
    ):
        generate(folder, quantization="int5")
