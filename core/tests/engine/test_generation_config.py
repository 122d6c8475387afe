from __future__ import annotations

import pytest

from inferplane.engine.generation_config import announcement, sampling_defaults
from inferplane.models.errors import ModelLoadError


def test_defaults_carry_the_names_of_sampling_parameters() -> None:
    config = {
        "temperature": 0.1,
        "top_k": 1,
        "repetition_penalty": 1.05,
        "max_new_tokens": 7,
        "do_sample": True,
        "eos_token_id": [1, 2],
        "transformers_version": "5",
    }
    defaults = sampling_defaults(config)
    assert defaults == {"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.05, "max_tokens": 7}
    assert "temperature 0.1" in announcement(defaults)
    assert "--generation-config none" in announcement(defaults)


def test_null_and_neutral_values_change_nothing() -> None:
    assert sampling_defaults({"temperature": None, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}) == {}


@pytest.mark.parametrize("field", ["temperature", "top_p", "max_new_tokens"])
def test_a_value_out_of_range_names_the_field(field: str) -> None:
    with pytest.raises(ModelLoadError, match=f"generation_config.json: {field} is -3"):
        sampling_defaults({field: -3})
