"""What is said of each architecture is what its model has, and each is compared with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from families import FAMILIES
from inferplane.cli.models import models
from inferplane.config import PoolerConfig
from inferplane.layers import SparseMoE, walk_layers
from inferplane.models.catalog import CATALOG, is_encoder
from inferplane.models.registry import BUILT_IN, build_model
from model_harness import make_context, read_config
from tiny_poolers import POOLERS, make_tiny_pooler


def test_every_architecture_has_its_facts():
    assert CATALOG.keys() == BUILT_IN.keys()


def test_every_architecture_is_compared_with_transformers():
    import transformers

    config_classes = {getattr(transformers, config_class) for config_class, _ in FAMILIES.values()}
    compared = {
        transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[each].__name__
        for each in config_classes
    }
    assert BUILT_IN.keys() <= compared | POOLERS.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_those_of_the_model(family: str, tiny_model: Callable[[str], Path]):
    model = build_model(make_context(hf_config := read_config(tiny_model(family))))
    facts = CATALOG[hf_config["architectures"][0]]
    assert {type(layer.spec).__name__ for layer in model.attention_layers()} <= set(facts.kv_specs)
    mixtures = [layer for layer in walk_layers(model) if isinstance(layer, SparseMoE)]
    assert bool(mixtures) == ("experts" in facts.features)
    assert any(layer.shared for layer in mixtures) == ("shared experts" in facts.features)
    sigmoid = any(layer.router.routing.has_selection_bias for layer in mixtures)
    assert sigmoid == ("sigmoid router" in facts.features)


@pytest.mark.parametrize("architecture", POOLERS)
def test_facts_are_those_of_the_model_that_pools(architecture: str, tmp_path: Path):
    folder = make_tiny_pooler(architecture, tmp_path)
    model = build_model(
        make_context(read_config(folder), pooler=PoolerConfig("mean", ("embed",), labels=("a",)))
    )
    layers = [*model.attention_layers(), *model.encoder_layers()]
    assert {type(layer.spec).__name__ for layer in layers} <= set(CATALOG[architecture].kv_specs)
    assert is_encoder(architecture) == bool(model.encoder_layers())


def test_the_listing_says_what_is_known():
    rows = json.loads(CliRunner().invoke(models, ["list", "--json"], catch_exceptions=False).output)
    by_name = {row["architecture"]: row for row in rows}
    assert by_name.keys() >= BUILT_IN.keys()
    assert by_name["BertModel"]["tasks"] == ["embed", "score"]
    assert by_name["GptOssForCausalLM"] == {
        "architecture": "GptOssForCausalLM",
        "tasks": ["generate"],
        "family": "GPT-OSS",
        "features": ["windows", "attention sinks", "experts"],
        "kv_specs": ["FullAttentionSpec", "SlidingWindowSpec"],
        "tested": ["random weights", "trained weights"],
        "implementation": BUILT_IN["GptOssForCausalLM"],
    }
    table = CliRunner().invoke(models, ["list"], catch_exceptions=False).output
    assert "IMPLEMENTATION" in table and "windows, attention sinks, experts" in table
