from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from inferplane.models.errors import ModelLoadError
from inferplane.models.fallback import FALLBACK
from inferplane.models.llama import MistralForCausalLM
from inferplane.models.registry import (
    BUILT_IN,
    build_model,
    find_target,
    known_architectures,
    load_model,
    model_class,
    resolve_architecture,
    why_one_rank,
)
from model_harness import PromptRun, load_tiny, make_context, read_config, read_tensors

PLUGIN_TARGET = "inferplane.models.llama:MistralForCausalLM"


SHARED = {
    "BertForMaskedLM": "BertModel",
    "ModernBertForMaskedLM": "ModernBertModel",
    "RobertaForMaskedLM": "XLMRobertaModel",
    "RobertaForSequenceClassification": "XLMRobertaForSequenceClassification",
    "RobertaModel": "XLMRobertaModel",
    "XLMRobertaForMaskedLM": "XLMRobertaModel",
}
"""Architectures that are computed by the class of another: their encoders are alike, and no token is predicted."""


@pytest.mark.parametrize("architecture", BUILT_IN)
def test_every_built_in_target_is_a_model(architecture: str):
    assert model_class(architecture).__name__ == SHARED.get(architecture, architecture)


def test_an_unknown_architecture_is_refused_with_near_names_and_the_list():
    with pytest.raises(ModelLoadError) as caught:
        find_target("LlamaForCasualLM")
    message = str(caught.value)
    assert "'LlamaForCasualLM'; did you mean LlamaForCausalLM" in message
    assert message.endswith("There are: " + ", ".join(sorted(BUILT_IN)))
    with pytest.raises(ModelLoadError) as caught:
        find_target("T5")
    assert "did you mean" not in str(caught.value)


def test_what_transformers_alone_has_goes_to_the_fallback_without_torch():
    code = (
        "import sys; from inferplane.models.registry import find_target, why_one_rank; "
        "print(find_target('OPTForCausalLM'), 'torch' in sys.modules, why_one_rank('OPTForCausalLM'))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == f"{FALLBACK} False has no model file and runs by transformers' implementation\n"


def test_what_is_not_split_over_ranks_is_known_before_it_is_built():
    assert why_one_rank("LlamaForCausalLM") is None
    assert why_one_rank("OPTForCausalLM", {"OPTForCausalLM": PLUGIN_TARGET}) is None


def test_plugins_add_architectures_and_replace_built_in_ones():
    plugin_models = {"NewForCausalLM": PLUGIN_TARGET, "LlamaForCausalLM": PLUGIN_TARGET}
    assert known_architectures(plugin_models).keys() == {*BUILT_IN, "NewForCausalLM"}
    assert model_class("NewForCausalLM", plugin_models) is MistralForCausalLM
    assert model_class("LlamaForCausalLM", plugin_models) is MistralForCausalLM
    with pytest.raises(ModelLoadError, match="did you mean NewForCausalLM"):
        find_target("NewerForCausalLM", plugin_models)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.to.be.found:Model", "nowhere.to.be.found:Model, which runs X, cannot be imported"),
        ("inferplane.models.llama:Lama", "llama:Lama, which runs X, cannot be imported"),
        ("inferplane.models.shape:Shape", "is no subclass of inferplane.api.model.Model"),
        ("inferplane.models.llama", "cannot be imported"),
    ],
)
def test_a_target_that_cannot_be_had_is_named(target: str, message: str):
    with pytest.raises(ModelLoadError, match=message):
        model_class("X", {"X": target})


@pytest.mark.parametrize(
    ("hf_config", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ["SomethingElse", "Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
    ],
)
def test_the_first_architecture_that_can_run_is_chosen(hf_config: dict[str, Any], expected: str):
    assert resolve_architecture(hf_config) == expected


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [3], ["T5"]])
def test_a_config_without_a_usable_architecture_is_refused(architectures: Any):
    with pytest.raises(ModelLoadError):
        resolve_architecture({"architectures": architectures})


def test_an_unknown_quantization_is_refused_by_its_method(tiny_model: Callable[[str], Path]):
    hf_config = {**read_config(tiny_model("llama")), "quantization_config": {"quant_method": "spqr"}}
    with pytest.raises(ModelLoadError, match="quant_method 'spqr'"):
        build_model(make_context(hf_config))


class FolderCheckpoint:
    """As much of a checkpoint as loading a model takes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shown: list[bool] = []

    def tensors(self, progress: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        self.shown.append(progress)
        return read_tensors(self.folder)


def test_load_model_reads_the_checkpoint(tiny_model: Callable[[str], Path]):
    folder = tiny_model("qwen3")
    checkpoint: Any = FolderCheckpoint(folder)
    model = load_model(make_context(read_config(folder)), partial(checkpoint.tensors, progress=True))
    prompts = [[3, 1, 4, 1, 5]]
    assert torch.equal(PromptRun(model).logits(prompts)[0], PromptRun(load_tiny(folder)).logits(prompts)[0])
    assert checkpoint.shown == [True]


def test_load_model_draws_dummy_weights_by_the_seed(tiny_model: Callable[[str], Path]):
    folder = tiny_model("llama")
    checkpoint: Any = FolderCheckpoint(folder)
    logits = []
    for seed in (1, 1, 2):
        ctx = make_context(read_config(folder), load_format="dummy", seed=seed)
        logits.append(PromptRun(load_model(ctx, checkpoint.tensors)).logits([[3, 1, 4]])[0])
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    assert checkpoint.shown == []


def test_looking_up_an_architecture_imports_no_torch():
    code = (
        "import sys; from inferplane.models.registry import resolve_architecture as f; "
        "f({'architectures': ['LlamaForCausalLM']}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
