"""Which layers look back on how many tokens, and which keep a state of them instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import whole_number

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR = "linear_attention"
"""Any layer with a state."""
_OTHER_NAMES = {"mamba": LINEAR, "conv": LINEAR, "attention": FULL}


def layer_type(
    hf: Mapping[str, Any], index: int, usual: str, known: tuple[str, ...] = (FULL, SLIDING, CHUNKED)
) -> str:
    """Of layer number ``index``; ``usual`` where the configuration has no ``layer_types``.

    Raises `ModelLoadError` for a list of another length than the model and for a type that is not known.
    """
    types = hf.get("layer_types")
    if types is None:
        return usual
    num_layers = whole_number(hf, "num_hidden_layers")
    if not isinstance(types, (list, tuple)) or len(types) != num_layers:
        raise ModelLoadError(f"layer_types should be a list of {num_layers} types, but is {types!r}")
    found = _OTHER_NAMES.get(str(types[index]), types[index])
    if found not in known:
        raise ModelLoadError(f"layer_types[{index}] is {types[index]!r}; known: {', '.join(known)}")
    return found


def mixer_type(hf: Mapping[str, Any], index: int, usual: str) -> str:
    """FULL or LINEAR."""
    return layer_type(hf, index, usual, known=(FULL, LINEAR))


def full_every(hf: Mapping[str, Any], index: int, period: int) -> str:
    """The type of a layer where every ``period``-th sees all tokens and the others have a window."""
    return layer_type(hf, index, SLIDING if (index + 1) % period else FULL)


def window_size(hf: Mapping[str, Any], default: int | None = 4096) -> int | None:
    """Tokens that a layer with a window sees, itself included. ``default`` stands for a missing key; null is none."""
    if hf.get("sliding_window", default) is None:
        return None
    return whole_number(hf, "sliding_window", default)
