"""Rotary position settings: the many ways in which configurations write them, and the frequencies they mean.

Free of torch. A configuration may write them flat (``rope_theta``, ``rope_scaling`` with ``type`` or ``rope_type``)
or as ``rope_parameters``, once for all layers or once for each type of layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from inferplane.models.errors import ModelLoadError

Frequencies = NDArray[np.float64]

_ALIASES = {"su": "longrope"}
_DEFAULT_THETA = 10000.0
# names of nested settings where a configuration does not list its layer types
_USUAL_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    rope_type: str
    """A key of `ROPE_TYPES`."""
    theta: float
    rotary_dim: int
    """Leading dimensions of a head that are rotated."""
    max_position_embeddings: int
    original_max_position_embeddings: int
    """Tokens that the model was trained on before its context was stretched."""
    factor: float = 1.0
    attention_factor: float | None = None
    """Multiplies cos and sin; None where it follows from the factor."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    @property
    def max_model_len(self) -> int:
        """Longest context in tokens that the settings are made for.

        ``max_position_embeddings`` is the stretched length with llama3 and longrope, but the length before it with
        linear and dynamic; yarn is written both ways, so its own original length counts.
        """
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return int(self.original_max_position_embeddings * self.factor)
        return self.max_position_embeddings


def rope_config(
    hf_config: Mapping[str, Any], *, layer_type: str | None = None, head_dim: int | None = None
) -> RopeConfig:
    """The settings of a configuration, or of one type of its layers where each has its own.

    ``head_dim`` is for models that rotate a part of the head which the configuration names in its own way.
    Raises `ModelLoadError` naming an unknown rope type, a missing sub-key or one of the wrong kind.
    """
    settings = _Settings(_flat_settings(hf_config, layer_type))
    rope_type = settings.kind()
    max_positions = _positive_int(hf_config, "max_position_embeddings", 2048)
    # Phi-3 writes its original length next to the settings, where it takes precedence
    original = hf_config.get("original_max_position_embeddings") or settings.number(
        "original_max_position_embeddings"
    )
    config = RopeConfig(
        rope_type=rope_type,
        theta=settings.number("rope_theta") or _DEFAULT_THETA,
        rotary_dim=_rotary_dim(hf_config, settings, head_dim),
        max_position_embeddings=max_positions,
        original_max_position_embeddings=int(original or max_positions),
        factor=settings.factor(rope_type, original, max_positions),
        attention_factor=settings.number("attention_factor"),
        beta_fast=settings.number("beta_fast") or 32.0,
        beta_slow=settings.number("beta_slow") or 1.0,
        mscale=settings.number("mscale"),
        mscale_all_dim=settings.number("mscale_all_dim"),
        truncate=settings.get("truncate") is not False,
        low_freq_factor=settings.number("low_freq_factor", required=rope_type == "llama3"),
        high_freq_factor=settings.number("high_freq_factor", required=rope_type == "llama3"),
        short_factor=settings.numbers("short_factor", required=rope_type == "longrope"),
        long_factor=settings.numbers("long_factor", required=rope_type == "longrope"),
    )
    _check(config)
    return config


def _check(config: RopeConfig) -> None:
    """What the formulas below divide by."""
    if config.theta <= 1:
        raise ModelLoadError(f"rope_theta should be greater than 1, but is {config.theta}")
    if config.original_max_position_embeddings < 2:
        raise ModelLoadError(
            f"original_max_position_embeddings should be at least 2, but is {config.original_max_position_embeddings}"
        )
    low, high = config.low_freq_factor, config.high_freq_factor
    if config.rope_type == "llama3" and (low is None or high is None or not 0 < low < high):
        raise ModelLoadError(
            f"low_freq_factor {low} should be positive and less than high_freq_factor {high}"
        )


def max_model_len(hf_config: Mapping[str, Any]) -> int | None:
    """Longest context in tokens; None where the configuration does not tell. Stretching of positions counts.

    Where types of layers differ, some see less by design, so the longest counts.
    """
    if hf_config.get("max_position_embeddings") is None:
        return None
    layer_types: list[str | None] = [*_nested_layer_types(hf_config)] or [None]
    return max(rope_config(hf_config, layer_type=layer_type).max_model_len for layer_type in layer_types)


def inverse_frequencies(config: RopeConfig, seq_len: int | None = None) -> tuple[Frequencies, float]:
    """``[rotary_dim / 2]`` radians per position, and the factor on cos and sin.

    ``seq_len`` is the length of the context in tokens, by which dynamic and longrope choose; None means the length
    before any stretching. Other types do not depend on it.
    """
    return ROPE_TYPES[config.rope_type](config, seq_len)


def _flat_settings(hf_config: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """One table with everything, whichever way it was written."""
    settings = _written_settings(hf_config)
    nested = _nested_layer_types(hf_config)
    theta = hf_config.get("rope_theta")
    if nested:
        if layer_type not in nested:
            raise ModelLoadError(
                f"rope settings differ by layer type ({', '.join(nested)}); {layer_type!r} has none"
            )
        settings = settings[layer_type] or {}
    elif layer_type == "sliding_attention" and hf_config.get("rope_local_base_freq"):
        # Gemma 3 before the settings could be nested: local layers have their own base and no scaling
        settings, theta = {}, hf_config["rope_local_base_freq"]
    outer = {"rope_theta": theta, "partial_rotary_factor": hf_config.get("partial_rotary_factor")}
    return {**{key: value for key, value in outer.items() if value is not None}, **settings}


def _written_settings(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        raise ModelLoadError(f"rope settings should be a table, but are {settings!r}")
    return settings


def _nested_layer_types(hf_config: Mapping[str, Any]) -> list[str]:
    """The layer types that have settings of their own; empty where the settings hold for all layers."""
    layer_types = {*_USUAL_LAYER_TYPES, *(hf_config.get("layer_types") or ())}
    return [name for name in _written_settings(hf_config) if name in layer_types]


class _Settings:
    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table

    def get(self, key: str) -> Any:
        return self.table.get(key)

    def kind(self) -> str:
        kind = self.table.get("rope_type") or self.table.get("type") or "default"
        kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
        if kind not in ROPE_TYPES:
            raise ModelLoadError(f"rope type {kind!r} is unknown; known types: {', '.join(ROPE_TYPES)}")
        return kind

    def number(self, key: str, *, required: bool = False) -> float | None:
        value = self.table.get(key)
        if value is None and not required:
            return None
        if not _is_number(value) or value < 0:
            raise ModelLoadError(f"rope setting {key} should be a positive number, but is {value!r}")
        return float(value)

    def numbers(self, key: str, *, required: bool) -> tuple[float, ...] | None:
        values = self.table.get(key)
        if values is None and not required:
            return None
        if not isinstance(values, (list, tuple)) or not all(
            _is_number(value) and value > 0 for value in values
        ):
            raise ModelLoadError(
                f"rope setting {key} should be a list of positive numbers, but is {values!r}"
            )
        return tuple(map(float, values))

    def factor(self, rope_type: str, original: float | None, max_positions: int) -> float:
        factor = self.number("factor", required=rope_type in ("linear", "dynamic", "llama3"))
        if factor == 0:
            raise ModelLoadError("rope setting factor is 0, which would divide positions by nothing")
        if factor is None and rope_type in ("yarn", "longrope") and original:
            return max_positions / original
        return 1.0 if factor is None else factor


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _positive_int(hf_config: Mapping[str, Any], key: str, default: int) -> int:
    value = hf_config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value <= 0:
        raise ModelLoadError(f"{key} should be a positive whole number, but is {value!r}")
    return value


def _rotary_dim(hf_config: Mapping[str, Any], settings: _Settings, head_dim: int | None) -> int:
    if head_dim is None and hf_config.get("head_dim") is None:
        head_dim = _positive_int(hf_config, "hidden_size", 0) // _positive_int(
            hf_config, "num_attention_heads", 0
        )
    head_dim = _positive_int(hf_config, "head_dim", 0) if head_dim is None else head_dim
    partial = settings.number("partial_rotary_factor")
    rotary_dim = int(head_dim * (1.0 if partial is None else partial))
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ModelLoadError(
            f"{rotary_dim} of {head_dim} head dimensions would be rotated, but they turn in pairs"
        )
    return rotary_dim


def _plain(config: RopeConfig, theta: float | None = None) -> Frequencies:
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    return 1.0 / (config.theta if theta is None else theta) ** exponents


def _default(config: RopeConfig, seq_len: int | None) -> tuple[Frequencies, float]:
    return _plain(config), 1.0


def _linear(config: RopeConfig, seq_len: int | None) -> tuple[Frequencies, float]:
    """Positions divided by the factor (Chen et al., 2023, arXiv 2306.15595)."""
    return _plain(config) / config.factor, 1.0


def _dynamic(config: RopeConfig, seq_len: int | None) -> tuple[Frequencies, float]:
    """A base that grows with the length once it exceeds the trained one (NTK-aware scaling)."""
    trained = config.max_position_embeddings
    length = max(seq_len or 0, trained)
    growth = config.factor * length / trained - (config.factor - 1)
    dim = config.rotary_dim
    exponent = dim / (dim - 2) if dim > 2 else 1.0
    return _plain(config, config.theta * growth**exponent), 1.0


def _yarn(config: RopeConfig, seq_len: int | None) -> tuple[Frequencies, float]:
    """Fast dimensions kept, slow ones divided, a ramp between them (Peng et al., 2023, arXiv 2309.00071)."""

    def dimension_with_rotations(num_rotations: float) -> float:
        wavelengths = config.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return config.rotary_dim * math.log(wavelengths) / (2 * math.log(config.theta))

    low, high = dimension_with_rotations(config.beta_fast), dimension_with_rotations(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    width = high - low if high != low else 0.001
    slow = np.clip((np.arange(config.rotary_dim // 2) - low) / width, 0.0, 1.0)
    plain = _plain(config)
    return plain / config.factor * slow + plain * (1.0 - slow), _yarn_attention_factor(config)


def _yarn_attention_factor(config: RopeConfig) -> float:
    def growth(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return growth(config.mscale) / growth(config.mscale_all_dim)
    return growth(1.0)


def _llama3(config: RopeConfig, seq_len: int | None) -> tuple[Frequencies, float]:
    """Long wavelengths divided, short ones kept, those between blended (Llama 3.1)."""
    low, high = config.low_freq_factor, config.high_freq_factor
    assert low is not None and high is not None, "checked when the settings were read"
    plain = _plain(config)
    rotations = config.original_max_position_embeddings * plain / (2 * math.pi)
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return (1.0 - smooth) * plain / config.factor + smooth * plain, 1.0


def _longrope(config: RopeConfig, seq_len: int | None) -> tuple[Frequencies, float]:
    """Each dimension divided by its own searched factor (Ding et al., 2024, arXiv 2402.13753)."""
    original = config.original_max_position_embeddings
    factors = config.long_factor if seq_len and seq_len > original else config.short_factor
    assert factors is not None, "checked when the settings were read"
    if len(factors) != config.rotary_dim // 2:
        raise ModelLoadError(
            f"longrope has {len(factors)} factors for {config.rotary_dim // 2} pairs of dimensions"
        )
    attention_factor = config.attention_factor
    if attention_factor is None:
        stretch = config.factor
        attention_factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return _plain(config) / np.asarray(factors), attention_factor


ROPE_TYPES: dict[str, Callable[[RopeConfig, int | None], tuple[Frequencies, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
