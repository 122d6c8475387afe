"""What enters and leaves the prefix cache, for plugins that ask through ``kv_cache_listeners``. Imports no torch."""

from __future__ import annotations

from inferplane.kvcache.events import KVCacheListener

__all__ = ["KVCacheListener"]
