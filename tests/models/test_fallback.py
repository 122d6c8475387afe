"""Decoders without a file here: transformers' own layers over the paged cache answer as transformers does.

Prompts of ragged lengths in a pool that is too small for all of them, in chunks, and once more with a prefix cached.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

import tiny_models
from families import OTHER_FAMILIES
from inferplane.api.kv import FullAttentionSpec, SlidingWindowSpec
from inferplane.cli.models import models
from inferplane.cli.plugins import plugins
from inferplane.config import ConfigError
from inferplane.engine.kv_grouping import group_layers
from inferplane.engine.kv_sizing import bytes_per_request
from inferplane.models.errors import ModelLoadError
from inferplane.models.fallback import FALLBACK
from inferplane.models.registry import BUILT_IN, build_model, load_model
from inferplane.models.transformers_attention import check_tokens_meet_in_attention
from model_harness import make_context, read_config, read_tensors, run_ranks
from offline import assert_idle, greedy, open_llm
from teacher import Teacher

LENGTHS = (1, 5, 17, 40, 60, 90)
NUM_TOKENS, MAX_LEN, MAX_STEP_TOKENS = 24, 144, 32
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gptj", "gpt_bigcode", "phi", "exaone4")]
QUICK = [name for name in OTHER_FAMILIES if name not in {each.values[0] for each in SLOW}]


def context(folder: Path, **more: Any) -> Any:
    return make_context(read_config(folder), max_model_len=MAX_LEN, path=folder, **more)


@pytest.mark.usefixtures("no_step_raises")
@pytest.mark.parametrize("family", [*QUICK, *SLOW])
def test_greedy_tokens_equal_those_of_transformers(
    family: str, tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model(family)
    architecture = read_config(folder)["architectures"][0]
    assert architecture not in BUILT_IN
    specs = {
        layer.name: replace(layer.spec, block_size=16)
        for layer in build_model(context(folder)).attention_layers()
    }
    groups = group_layers(specs, MAX_LEN, MAX_STEP_TOKENS)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    teacher, params = Teacher(folder), greedy(NUM_TOKENS, logprobs=0)
    with (
        caplog.at_level(logging.WARNING, "inferplane"),
        open_llm(
            folder,
            kv_cache_bytes=bytes_per_request(groups, MAX_LEN, MAX_STEP_TOKENS),
            max_model_len=MAX_LEN,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            max_num_seqs=8,
            block_size=16,
        ) as llm,
    ):
        teacher.assert_greedy(llm.generate(inputs, params, use_tqdm=False), NUM_TOKENS)
        assert llm.stats().num_preemptions > 0
        num_hits = llm.stats().num_prefix_hit_tokens
        teacher.assert_greedy(llm.generate(inputs[-1:], params, use_tqdm=False), NUM_TOKENS)
        assert llm.stats().num_prefix_hit_tokens > num_hits
        assert_idle(llm)
    assert f"there is no model file for {architecture}" in caplog.text
    assert "fallback" in caplog.text


def test_layers_keep_what_they_ask_for(tiny_model: Callable[[str], Path]) -> None:
    full, window = build_model(context(tiny_model("exaone4"))).attention_layers()[::-1]
    assert isinstance(full.spec, FullAttentionSpec)
    assert isinstance(window.spec, SlidingWindowSpec) and window.spec.window == 24
    for layer in build_model(context(tiny_model("vaultgemma"))).attention_layers():
        assert (layer.scale, layer.soft_cap) == (24**-0.5, 5.0)
    assert all(
        layer.has_sinks for layer in build_model(context(tiny_model("granite_swa"))).attention_layers()
    )
    of_shared = build_model(context(tiny_model("gemma3n"))).attention_layers()
    assert [layer.name for layer in of_shared] == [f"model.layers.{index}.self_attn" for index in (0, 1)]
    for layer in build_model(context(tiny_model("minicpm3"))).attention_layers():
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (4, 4, 40)


def test_listing_and_explanation_say_that_it_is_the_fallback(tiny_model: Callable[[str], Path]) -> None:
    def ask(command: click.Command, *words: str) -> str:
        return CliRunner().invoke(command, words, catch_exceptions=False).output

    folder = str(tiny_model("opt"))
    assert json.loads(ask(models, "list", "--json"))[-1]["implementation"] == FALLBACK
    asked = (plugins, "explain", folder, "--device", "cpu")
    text = ask(*asked)
    assert f"run by   {FALLBACK}, the fallback: transformers' implementation" in text
    assert "model.decoder.layers.0.self_attn and 1 more like it" in text
    assert json.loads(ask(*asked, "--json"))["implementation"] == FALLBACK


def test_loading_shows_no_bar_of_transformers(
    tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_model("smollm3")
    capsys.readouterr()
    load_model(context(folder), lambda: read_tensors(folder))
    assert "Loading weights" not in capsys.readouterr().err


def test_drawn_weights_need_no_checkpoint(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("opt")
    (folder / "model.safetensors").rename(folder / "hidden")
    try:
        with open_llm(folder, load_format="dummy") as llm:
            [output] = llm.generate([{"prompt_token_ids": [3, 4]}], greedy(4), use_tqdm=False)
    finally:
        (folder / "hidden").rename(folder / "model.safetensors")
    assert len(output.outputs[0].token_ids) == 4


def test_drawn_weights_save_no_devices_random_state(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a platform's device may not have, and which would start every other one of the machine."""

    def module_of(device: torch.device | str) -> Any:
        assert torch.device(device).type == "cpu"
        return torch.cpu

    monkeypatch.setattr(torch, "get_device_module", module_of)
    before = torch.get_rng_state()
    build_model(context(tiny_model("opt"), load_format="dummy")).load_weights([])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_experts_are_multiplied_as_transformers_chooses(
    load_format: str, tiny_model: Callable[[str], Path]
) -> None:
    """The way that the meta device needs would gather a whole expert for each token."""
    from transformers import AutoModelForCausalLM

    folder = tiny_model("ernie_moe")
    model: Any = build_model(context(folder, load_format=load_format))
    model.load_weights(read_tensors(folder))
    chosen = AutoModelForCausalLM.from_pretrained(folder).config._experts_implementation
    assert model._whole.config._experts_implementation == chosen != "batched_mm"


def test_tensors_that_do_not_fit_are_named(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("smollm3")
    tensors = dict(read_tensors(folder))
    del tensors["model.norm.weight"]
    tensors["model.extra.weight"] = torch.zeros(2)
    with pytest.raises(
        ModelLoadError, match=r"missing: model\.norm\.weight; unexpected: model\.extra\.weight"
    ):
        load_model(context(folder), lambda: tensors.items())


@pytest.mark.parametrize(
    ("config_class", "changes", "reason"),
    [
        ("RecurrentGemmaConfig", {}, "keeps a state between tokens"),
        ("BloomConfig", {}, "computes attention itself"),
        (
            "GPTNeoConfig",
            {"num_layers": 2, "attention_types": [[["global"], 2]]},
            "computes attention itself",
        ),
        ("DogeConfig", {}, "gives attention a mask of its own"),
        ("DiffLlamaConfig", {}, "asked for 4 times by 2 layers"),
        ("BertConfig", {"is_decoder": False}, "lets tokens see those behind them"),
        (
            "HeliumConfig",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'dynamic' of HeliumForCausalLM",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(
    config_class: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = getattr(transformers, config_class)(vocab_size=128, **sizes, **changes)
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    config.architectures = [mapping[type(config)].__name__]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=reason):
        build_model(context(tmp_path))


def test_settings_that_it_cannot_follow_are_refused(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("opt")
    with pytest.raises(ConfigError, match=r"OPTForCausalLM has no model file .* on one rank, not 2"):
        run_ranks(2, lambda comm: build_model(context(folder, comm=comm)))
    with pytest.raises(ConfigError, match="leave out fp8_e4m3"):
        build_model(context(folder, kv_dtype="fp8_e4m3"))
    plain = context(folder)
    counting = replace(plain, config=replace(plain.config, count_expert_tokens=True))
    with pytest.raises(ConfigError, match="whose routers are not counted: leave it out") as raised:
        build_model(counting)
    assert raised.value.option == "count_expert_tokens"


def test_tokens_that_mix_outside_of_attention_are_found() -> None:
    class Mixing(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **more: Any) -> Any:
            hidden = torch.nn.functional.one_hot(input_ids, 8).float()
            hidden[:, 1:] += self.share * hidden[:, :-1]
            return type("Output", (), {"last_hidden_state": hidden})

    decoder = Mixing()
    decoder.share = 0.0
    check_tokens_meet_in_attention(decoder, [], 8, torch.device("cpu"))
    decoder.share = 0.1
    with pytest.raises(ModelLoadError, match="mixes neighbouring tokens outside of attention"):
        check_tokens_meet_in_attention(decoder, [], 8, torch.device("cpu"))
    decoder.share = float("nan")
    with pytest.raises(ModelLoadError, match=r"Mixing .* not finite in torch\.float32: use another --dtype"):
        check_tokens_meet_in_attention(decoder, [], 8, torch.device("cpu"))
