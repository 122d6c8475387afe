"""How keys and values are stored that are not of the activations' type. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inferplane.api.kv import KVCacheSpec

_NUMBERS = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8_per_token_head": torch.int8,
}


@dataclass(frozen=True, eq=False)
class KVScales:
    """What 1 in a layer's fp8 cache stands for: stored is a key or value divided by its head's scale.

    Filled once while weights are loaded, 1 where the checkpoint has none. The tensors stay where they are, so that they
    may be recorded in a graph.
    """

    k: torch.Tensor
    """[num_kv_heads] float32, on the device."""
    v: torch.Tensor
    """[num_kv_heads] float32, on the device."""

    @classmethod
    def ones(cls, num_kv_heads: int, device: torch.device) -> KVScales:
        return cls(*torch.ones(2, num_kv_heads, dtype=torch.float32, device=device))


def number_type(name: str) -> torch.dtype:
    """Of the numbers in a cache of a KV dtype, as `AttentionSpec.dtype` names it."""
    found = _NUMBERS.get(name) or getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def stored_type(spec: KVCacheSpec, activations: torch.dtype) -> torch.dtype:
    """Of the numbers that a layer keeps; of a spec that names none, the activations' own."""
    name = getattr(spec, "dtype", None)
    return activations if name is None else number_type(name)
