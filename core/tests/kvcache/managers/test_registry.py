from __future__ import annotations

from dataclasses import dataclass

import pytest

from inferplane.api.kv import FullAttentionSpec, KVCacheSpec
from inferplane.kvcache.managers import FullAttentionManager, manager_class_for


@dataclass(frozen=True, kw_only=True)
class StateOfAPlugin(KVCacheSpec):
    pass


@dataclass(frozen=True, kw_only=True)
class FullAttentionOfAPlugin(FullAttentionSpec):
    pass


class ManagerOfAPlugin(FullAttentionManager):
    pass


def test_a_derived_spec_is_kept_like_its_nearest_known_class() -> None:
    spec = FullAttentionOfAPlugin(block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    assert manager_class_for(spec) is FullAttentionManager
    assert manager_class_for(spec, {FullAttentionOfAPlugin: ManagerOfAPlugin}) is ManagerOfAPlugin


def test_a_plugin_brings_the_manager_of_its_spec() -> None:
    spec = StateOfAPlugin(block_size=4)
    with pytest.raises(LookupError, match=r"StateOfAPlugin.*FullAttentionSpec"):
        manager_class_for(spec)
    assert manager_class_for(spec, {StateOfAPlugin: ManagerOfAPlugin}) is ManagerOfAPlugin
