"""Who holds which block of the KV pool, and which blocks can be reused. Host data only, free of torch."""

from inferplane.kvcache.block_pool import BlockPool, BlockPoolError
from inferplane.kvcache.coordinator import CachedPrefix, KVCacheManager, RequestBlocks

__all__ = ["BlockPool", "BlockPoolError", "CachedPrefix", "KVCacheManager", "RequestBlocks"]
