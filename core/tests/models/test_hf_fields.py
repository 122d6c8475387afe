from __future__ import annotations

from typing import Any

import pytest

from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, positive_number, whole_number


def test_values_are_read_and_defaults_stand_for_missing_and_null():
    hf_config: dict[str, Any] = {"size": 7, "zero": 0, "eps": 1e-5, "one": 1, "yes": True, "nothing": None}
    assert whole_number(hf_config, "size") == 7
    assert whole_number(hf_config, "zero", least=0) == 0
    assert whole_number(hf_config, "absent", 3) == whole_number(hf_config, "nothing", 3) == 3
    assert positive_number(hf_config, "eps", 1.0) == 1e-5
    assert positive_number(hf_config, "one", 2.0) == 1.0
    assert positive_number(hf_config, "nothing", 2.0) == 2.0
    assert flag(hf_config, "yes") is True
    assert flag(hf_config, "nothing") is False
    assert flag(hf_config, "absent", True) is True


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True, [2], None])
def test_what_is_no_count_is_refused_by_name(value: Any):
    with pytest.raises(
        ModelLoadError, match="size should be a whole number of at least 1 in the model's config"
    ):
        whole_number({"size": value}, "size")


@pytest.mark.parametrize("value", [0, -1.0, "2", True, float("nan")])
def test_what_is_no_positive_number_is_refused_by_name(value: Any):
    with pytest.raises(ModelLoadError, match="eps should be a positive number in the model's config"):
        positive_number({"eps": value}, "eps", 1.0)


@pytest.mark.parametrize("value", [0, 1, "true"])
def test_what_is_no_flag_is_refused_by_name(value: Any):
    with pytest.raises(ModelLoadError, match="bias should be true or false in the model's config"):
        flag({"bias": value}, "bias")
