"""Decoders without a file here, which transformers' implementation runs with our attention and KV. Free of torch."""

from __future__ import annotations

FALLBACK = "inferplane.models.transformers_model:TransformersModel"
"""``"module:Class"`` of all of them."""
_SUFFIXES = ("ForCausalLM", "LMHeadModel")


def has_fallback(architecture: str) -> bool:
    """Whether transformers has a decoder of this name. What that one does is seen when it is built."""
    if not architecture.endswith(_SUFFIXES):
        return False
    import transformers

    return architecture in dir(transformers)
