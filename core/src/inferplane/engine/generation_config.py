"""What a model's ``generation_config.json`` recommends, in the names of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.models.errors import ModelLoadError
from inferplane.request import ParameterError, SamplingParams

_PARAM_OF_FIELD = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Values for sampling parameters that a request leaves open; those that change nothing are left out.

    Raises `ModelLoadError` for a value that no request could ask for either.
    """
    defaults: dict[str, Any] = {}
    for field, param in _PARAM_OF_FIELD.items():
        value = generation_config.get(field)
        if value is None:
            continue
        try:
            given = SamplingParams(**{param: value})
        except ParameterError as error:
            raise ModelLoadError(
                f"generation_config.json: {field} is {value!r}: {error}; "
                "start with --generation-config none to go without"
            ) from error
        if param == "max_tokens" or getattr(given, param) != getattr(SamplingParams(), param):
            defaults[param] = value
    return defaults


def announcement(defaults: Mapping[str, Any]) -> str:
    values = ", ".join(f"{name} {value}" for name, value in defaults.items())
    return (
        f"sampling defaults of the model's generation_config.json: {values} "
        "(a request's own values win; --generation-config none turns them off)"
    )
