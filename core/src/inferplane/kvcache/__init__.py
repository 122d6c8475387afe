"""Who holds which block of the KV pools, and which blocks can be reused. Host data only, free of torch."""

from inferplane.kvcache.block_pool import BlockPool, BlockPoolError
from inferplane.kvcache.coordinator import KVCacheManager, PromisedBlocks
from inferplane.kvcache.events import KVCacheListener
from inferplane.kvcache.request_blocks import CachedPrefix, RequestBlocks

__all__ = [
    "BlockPool",
    "BlockPoolError",
    "CachedPrefix",
    "KVCacheListener",
    "KVCacheManager",
    "PromisedBlocks",
    "RequestBlocks",
]
