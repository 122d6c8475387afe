"""Sliding windows: which layers look back on how many tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.api.model import BuildContext
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, whole_number


def window_size(hf: Mapping[str, Any]) -> int | None:
    """A missing key is a window of 4096 tokens to transformers, null is none."""
    return None if hf.get("sliding_window", 4096) is None else whole_number(hf, "sliding_window", 4096)


def qwen_window(hf: Mapping[str, Any]) -> int | None:
    """Qwen's windows are off unless asked for, and then only in the layers from ``max_window_layers`` on."""
    if not flag(hf, "use_sliding_window"):
        return None
    layer_types = hf.get("layer_types")
    if layer_types is None:
        num_full = whole_number(hf, "max_window_layers", 28, least=0)
        has_window = num_full < whole_number(hf, "num_hidden_layers")
    else:
        has_window = "sliding_attention" in layer_types
    return window_size(hf) if has_window else None


def refuse_longer(window: int | None, ctx: BuildContext) -> None:
    """Within its window a layer sees every token, as with full attention, which is all there is."""
    max_model_len = ctx.config.model.max_model_len
    if window is not None and max_model_len > window:
        raise ModelLoadError(
            f"sliding_window is {window} tokens and max_model_len {max_model_len}: attention with a window is not "
            f"supported beyond it; set max_model_len to {window} or less"
        )
