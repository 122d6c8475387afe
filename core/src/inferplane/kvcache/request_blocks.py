"""What one request holds: `GroupBlocks` in one KV group, `RequestBlocks` over all of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from inferplane.kvcache.prefix import HashChain

NEVER = sys.maxsize
"""A number of tokens that no request reaches."""


class GroupBlocks:
    """The blocks of one request in one group. Changed by the coordinator and the group's manager only."""

    __slots__ = ("chain", "ids", "num_cached", "num_encoder_tokens", "num_left")

    def __init__(self, chain: HashChain | None, num_encoder_tokens: int = 0) -> None:
        self.chain = chain
        """Identities of its full blocks; groups of one block size share it. None without prefix caching."""
        self.num_encoder_tokens = num_encoder_tokens
        """Tokens of the input that an encoder has read."""
        self.ids: list[int] = []
        """In the order of the tokens. The first ``num_left`` are no longer the request's, or never were: no token to
        come sees what lay there, and the ids only keep the places of those behind them."""
        self.num_left = 0
        self.num_cached = 0
        """Blocks, from the first on, that were made findable (or found to have a twin)."""

    @property
    def held(self) -> list[int]:
        return self.ids[self.num_left :] if self.num_left else self.ids

    @property
    def num_held(self) -> int:
        return len(self.ids) - self.num_left


@dataclass(frozen=True, slots=True)
class GroupPrefix:
    """A cached prefix in one group: ``ids`` and ``num_left`` as in `GroupBlocks`. References nothing."""

    num_tokens: int
    ids: list[int]
    num_left: int = 0

    @property
    def held(self) -> list[int]:
        return self.ids[self.num_left :]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix that every group holds. Valid until the next call that changes a pool."""

    num_tokens: int
    groups: tuple[GroupPrefix, ...]


class RequestBlocks:
    """What one request holds of the pools. Made by `KVCacheManager.open`, and changed by that manager only."""

    __slots__ = ("cache_epoch", "capacity_tokens", "groups", "settle_at_tokens")

    def __init__(self, chains: Sequence[HashChain | None], num_encoder_tokens: int = 0) -> None:
        self.groups = [GroupBlocks(chain, num_encoder_tokens) for chain in chains]
        self.capacity_tokens = 0
        """Tokens that have a slot in every group."""
        self.settle_at_tokens = NEVER
        """The number of computed tokens at which `KVCacheManager.settle` has something to do."""
        self.cache_epoch = 0
        """The cache that this KV may enter: none after a reset since it was computed."""

    @property
    def block_ids(self) -> list[list[int]]:
        """For each group the ids in the order of the tokens, as workers are told them."""
        return [group.ids for group in self.groups]
