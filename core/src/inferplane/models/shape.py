"""The sizes that every decoder's configuration has, read with each family's defaults for missing keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inferplane.layers import Heads
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, positive_number, text, whole_number


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of one decoder, over all ranks."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    heads: Heads
    norm_eps: float
    activation: str
    has_tied_embeddings: bool


def read_shape(
    hf: Mapping[str, Any],
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    eps_key: str = "rms_norm_eps",
    eps: float = 1e-6,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    is_tied: bool = False,
) -> Shape:
    """The keyword arguments are what the family takes where the configuration lacks the key.

    ``kv_heads`` None means one for each query head, ``head_dim`` None the hidden size divided by their number.
    """
    hidden_size = whole_number(hf, "hidden_size")
    num_heads = whole_number(hf, "num_attention_heads")
    # null means one for each query head in every family, a missing key only in some
    default_kv_heads = num_heads if kv_heads is None or "num_key_value_heads" in hf else kv_heads
    num_kv_heads = whole_number(hf, "num_key_value_heads", default_kv_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
    return Shape(
        vocab_size=whole_number(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole_number(hf, "intermediate_size"),
        num_layers=whole_number(hf, "num_hidden_layers"),
        heads=Heads(
            num_heads, num_kv_heads, whole_number(hf, "head_dim", head_dim or hidden_size // num_heads)
        ),
        norm_eps=positive_number(hf, eps_key, eps),
        activation=text(hf, activation_key, activation),
        has_tied_embeddings=flag(hf, "tie_word_embeddings", is_tied),
    )
