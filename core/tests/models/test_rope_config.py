"""Rope settings old and new, against transformers' own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from inferplane.models.errors import ModelLoadError
from inferplane.models.rope_config import inverse_frequencies, max_model_len, rope_config

SIZES = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rope_theta": 50000.0,
}
FACTORS = {
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [1.0 + 0.5 * i for i in range(32)],
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 512},
    "yarn-ramp": {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16, "beta_slow": 2},
    "yarn-attention": {"factor": 4.0, "original_max_position_embeddings": 1024, "attention_factor": 1.25},
    "yarn-mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn-untruncated": {"factor": 32.0, "original_max_position_embeddings": 1024, "truncate": False},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {**FACTORS, "original_max_position_embeddings": 1024},
    "longrope-factor": {**FACTORS, "factor": 16.0, "original_max_position_embeddings": 1024},
}


def settings_of(case: str) -> dict[str, Any]:
    return {"rope_type": case.partition("-")[0], **SCALINGS[case]}


def spellings(case: str) -> dict[str, dict[str, Any]]:
    """The same settings in each way that configurations write them."""
    settings = settings_of(case)
    old = {"type": settings["rope_type"], **{k: v for k, v in settings.items() if k != "rope_type"}}
    without_theta = {key: value for key, value in SIZES.items() if key != "rope_theta"}
    new = {**settings, "rope_theta": SIZES["rope_theta"]}
    return {
        "rope_type": {**SIZES, "rope_scaling": settings},
        "type": {**SIZES, "rope_scaling": old},
        "rope_parameters": {**without_theta, "rope_parameters": new},
        "per layer type": {
            **without_theta,
            "layer_types": ["full_attention", "odd_attention"],
            "rope_parameters": {
                "odd_attention": new,
                "full_attention": {"rope_type": "default", "rope_theta": 77.0},
            },
        },
    }


def reference(case: str, seq_len: int | None) -> tuple[np.ndarray, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = case.partition("-")[0]
    sizes = {key: value for key, value in SIZES.items() if key != "rope_theta"}
    config = LlamaConfig(**sizes, rope_parameters={**settings_of(case), "rope_theta": SIZES["rope_theta"]})
    if rope_type == "default":
        return 1.0 / SIZES["rope_theta"] ** (np.arange(0, 64, 2) / 64), 1.0
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, device="cpu", seq_len=seq_len)
    return frequencies.double().numpy(), attention_factor


@pytest.mark.parametrize("seq_len", [None, 100, 1024, 1025, 9000])
@pytest.mark.parametrize("case", SCALINGS)
def test_every_spelling_means_what_it_means_to_transformers(case: str, seq_len: int | None) -> None:
    expected, expected_factor = reference(case, seq_len)
    for spelling, config in spellings(case).items():
        layer_type = "odd_attention" if spelling == "per layer type" else None
        frequencies, factor = inverse_frequencies(rope_config(config, layer_type=layer_type), seq_len)
        assert frequencies.dtype == np.float64
        # theirs are rounded to float32 on the way
        np.testing.assert_allclose(frequencies, expected, rtol=2e-6, err_msg=spelling)
        assert factor == pytest.approx(expected_factor, rel=1e-6), spelling


@pytest.mark.parametrize(
    ("case", "length"),
    [
        ("default", 4096),
        ("linear", 16384),
        ("dynamic", 8192),
        ("yarn", 4096),
        ("llama3", 4096),
        ("longrope", 4096),
    ],
)
def test_the_longest_context_follows_the_factor(case: str, length: int) -> None:
    for spelling, config in spellings(case).items():
        # among layer types the longest counts, and the plain one reaches as far as the configuration says
        expected = max(length, 4096) if spelling == "per layer type" else length
        assert max_model_len(config) == expected, spelling


def test_yarn_stretches_the_original_length_where_the_configuration_gives_that() -> None:
    # as Qwen 2.5 asks its users to write it
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert max_model_len({**SIZES, "max_position_embeddings": 32768, "rope_scaling": yarn}) == 131072
    del yarn["original_max_position_embeddings"]
    assert max_model_len({**SIZES, "max_position_embeddings": 32768, "rope_scaling": yarn}) == 131072


def test_no_length_is_known_without_a_field_for_it() -> None:
    assert max_model_len({"hidden_size": 64, "num_attention_heads": 4}) is None


def test_phi3_writes_its_original_length_next_to_the_settings() -> None:
    scaling = {"type": "su", **FACTORS}
    config = rope_config({**SIZES, "original_max_position_embeddings": 2048, "rope_scaling": scaling})
    assert (config.rope_type, config.original_max_position_embeddings, config.factor) == (
        "longrope",
        2048,
        2.0,
    )
    short, _ = inverse_frequencies(config, 2048)
    long, _ = inverse_frequencies(config, 2049)
    np.testing.assert_allclose(short / long, np.divide(FACTORS["long_factor"], FACTORS["short_factor"]))


def test_gemma3_gives_local_layers_their_own_base() -> None:
    config = {
        **SIZES,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    assert rope_config(config, layer_type="sliding_attention").theta == 10000.0
    assert rope_config(config, layer_type="sliding_attention").rope_type == "default"
    assert rope_config(config, layer_type="full_attention").rope_type == "linear"


def test_part_of_a_head() -> None:
    assert rope_config({**SIZES, "partial_rotary_factor": 0.5}).rotary_dim == 32
    assert rope_config({**SIZES, "head_dim": 128}).rotary_dim == 128
    assert rope_config({**SIZES, "head_dim": None}).rotary_dim == 64
    assert rope_config(SIZES, head_dim=16).rotary_dim == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
            "rope type 'spiral' is unknown; known types: default, linear",
        ),
        ({"rope_scaling": {"type": 3}}, "rope type 3 is unknown"),
        ({"rope_scaling": {"type": "linear"}}, "factor should be a positive number, but is None"),
        (
            {"rope_scaling": {"type": "linear", "factor": "2"}},
            "factor should be a positive number, but is '2'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor should be a positive number"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor should be"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "low_freq_factor 4.0 should be positive and less than high_freq_factor 4.0",
        ),
        ({"rope_scaling": {"type": "longrope", "factor": 8.0}}, "short_factor should be a list"),
        ({"rope_scaling": [1]}, "should be a table"),
        ({"rope_theta": 1.0}, "rope_theta should be greater than 1"),
        ({"head_dim": 63}, "63 of 63 head dimensions"),
        ({"hidden_size": None}, "hidden_size should be a positive whole number"),
        (
            {"rope_parameters": {"full_attention": {}}},
            r"differ by layer type \(full_attention\); None has none",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        rope_config({**SIZES, **change})


def test_longrope_needs_one_factor_for_each_pair() -> None:
    config = rope_config({**SIZES, "head_dim": 32, "rope_scaling": settings_of("longrope")})
    with pytest.raises(ModelLoadError, match="32 factors for 16 pairs"):
        inverse_frequencies(config)
