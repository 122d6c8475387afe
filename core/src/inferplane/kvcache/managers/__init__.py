"""One manager class for each kind of KV-cache spec: what blocks a request of that kind needs, finds and gives back."""

from __future__ import annotations

from collections.abc import Mapping

from inferplane.api.kv import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
)
from inferplane.kvcache.managers.base import GroupManager
from inferplane.kvcache.managers.bounded import BoundedManager
from inferplane.kvcache.managers.cross_attention import CrossAttentionManager
from inferplane.kvcache.managers.full_attention import FullAttentionManager

__all__ = [
    "BUILTIN_MANAGERS",
    "BoundedManager",
    "CrossAttentionManager",
    "FullAttentionManager",
    "GroupManager",
    "manager_class_for",
]

BUILTIN_MANAGERS: Mapping[type[KVCacheSpec], type[GroupManager]] = {
    FullAttentionSpec: FullAttentionManager,
    MLAAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: BoundedManager,
    ChunkedLocalSpec: BoundedManager,
    StateSpec: BoundedManager,
    CrossAttentionSpec: CrossAttentionManager,
}


def manager_class_for(
    spec: KVCacheSpec, more_managers: Mapping[type[KVCacheSpec], type[GroupManager]] | None = None
) -> type[GroupManager]:
    """The manager of a spec's class, or of the nearest class that it derives from.

    ``more_managers`` are those that plugins bring; they win over built-in ones. Raises `LookupError` naming the spec.
    """
    managers = {**BUILTIN_MANAGERS, **(more_managers or {})}
    for spec_class in type(spec).__mro__:
        if spec_class in managers:
            return managers[spec_class]
    raise LookupError(
        f"no manager knows how to keep {type(spec).__name__}; there are managers for "
        f"{', '.join(sorted(known.__name__ for known in managers))}: a plugin that declares a spec brings its manager"
    )
