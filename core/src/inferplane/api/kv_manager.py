"""Who owns which block of a KV group, for plugins that bring a spec of their own through ``kv_cache_specs``.

Imports no torch.
"""

from inferplane.kvcache.block_pool import BlockPool
from inferplane.kvcache.managers import FullAttentionManager, GroupManager
from inferplane.kvcache.prefix import HashChain

__all__ = ["BlockPool", "FullAttentionManager", "GroupManager", "HashChain"]
