"""Who owns which block of a KV group, for plugins that bring a spec of their own through ``kv_cache_specs``.

Imports no torch.
"""

from inferplane.kvcache.block_pool import BlockPool
from inferplane.kvcache.managers import BoundedManager, FullAttentionManager, GroupManager
from inferplane.kvcache.prefix import HashChain
from inferplane.kvcache.request_blocks import GroupBlocks, GroupPrefix

__all__ = [
    "BlockPool",
    "BoundedManager",
    "FullAttentionManager",
    "GroupBlocks",
    "GroupManager",
    "GroupPrefix",
    "HashChain",
]
