"""What a listener is told of the prefix cache: a router that sends requests to where their prefix is, say."""

from __future__ import annotations

from typing import Protocol


class KVCacheListener(Protocol):
    """Called in the step loop, so it returns at once and raises nothing.

    A block's ``key`` is the chained hash of its tokens, of all before them and of what else shapes the KV, followed by
    the number of its group in two bytes.
    """

    def block_stored(self, key: bytes, parent: bytes | None, token_ids: list[int]) -> None:
        """A full block can be found from now on. ``parent`` is the key of the one before it, None for a first one."""

    def block_removed(self, key: bytes) -> None:
        """A block's room was needed; it is found no longer."""

    def cache_cleared(self) -> None:
        """No block is found any longer."""
