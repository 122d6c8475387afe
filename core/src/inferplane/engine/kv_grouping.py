"""Which layers share block tables, and which share memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields

from inferplane.api.kv import KVCacheGroup, KVCacheSpec

MAX_GROUPS = 8
"""Of layers that share memory. Each group costs a block table and the backend's metadata in every step."""

_REACH = ("window", "chunk")
"""Fields of a spec that say which tokens are kept, and nothing of how they lie in memory."""


def group_layers(
    specs: Mapping[str, KVCacheSpec], max_model_len: int, max_step_tokens: int
) -> tuple[KVCacheGroup, ...]:
    """Layers of equal specs share block tables; groups whose blocks are alike share memory and a pool.

    Where some layers need only a part of the tokens, groups of equally many layers let every block id of the shared
    memory serve any of them: a model of 24 windowed layers and 4 full ones becomes seven groups of 4, of which the
    windowed six hold few blocks each. Where the numbers do not divide, the last group of a kind is smaller, and what
    its blocks leave unused is kept least for a request of ``max_model_len`` tokens. Layers that keep nothing are in no
    group.
    """
    by_shape: dict[Hashable, dict[KVCacheSpec, list[str]]] = {}
    for name, spec in specs.items():
        if spec.block_bytes == 0:
            continue
        by_shape.setdefault(_shape(spec), {}).setdefault(spec, []).append(name)
    groups = []
    for pool, kinds in enumerate(by_shape.values()):
        most = {spec: spec.max_num_blocks(max_model_len, max_step_tokens) for spec in kinds}
        size = _group_size({spec: len(names) for spec, names in kinds.items()}, most)
        for spec, names in kinds.items():
            groups += [
                KVCacheGroup(tuple(names[start : start + size]), spec, pool)
                for start in range(0, len(names), size)
            ]
    return tuple(groups)


def _shape(spec: KVCacheSpec) -> Hashable:
    """Equal for specs whose blocks can lie in one tensor."""
    return (
        spec.block_bytes,
        *((f.name, getattr(spec, f.name)) for f in fields(spec) if f.name not in _REACH),
    )


def _group_size(num_layers: Mapping[KVCacheSpec, int], num_blocks: Mapping[KVCacheSpec, int]) -> int:
    """Layers of a group: the number that takes the least memory for one request, of equals the largest."""

    def num_groups(spec: KVCacheSpec, size: int) -> int:
        return -(-num_layers[spec] // size)

    def cost(size: int) -> int:
        return size * sum(num_groups(spec, size) * num_blocks[spec] for spec in num_layers)

    largest = max(num_layers.values())
    limit = max(MAX_GROUPS, len(num_layers))
    candidates = [
        size for size in range(1, largest + 1) if sum(num_groups(spec, size) for spec in num_layers) <= limit
    ]
    return min(reversed(candidates), key=cost)
