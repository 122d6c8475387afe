"""The identity of a full block: a hash chained over all tokens up to its end and over what else shapes its KV."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

HASH_BYTES = 16
"""128 bits: two different prefixes meet by chance with odds below 1e-20 even among 1e9 blocks, and nobody can
construct two that do, which would let one caller read the KV of another."""


def root_hash(extra_keys: Sequence[str | int | bytes | None]) -> bytes:
    """The parent of a first block, from everything besides tokens that changes the KV: a cache salt, an adapter."""
    return blake2b(msgspec.msgpack.encode(list(extra_keys)), digest_size=HASH_BYTES).digest()


class HashChain:
    """Hashes of the full blocks of one request, computed as they are asked for and then kept.

    ``token_ids`` is the request's own list, not a copy: tokens appended to it later become part of later blocks.
    """

    __slots__ = ("_hashes", "_pack", "_root", "_token_ids", "block_size")

    def __init__(
        self, token_ids: list[int], block_size: int, extra_keys: Sequence[str | int | bytes | None] = ()
    ) -> None:
        self.block_size = block_size
        self._token_ids = token_ids
        self._root = root_hash(extra_keys)
        self._hashes: list[bytes] = []
        # A fixed byte order, so that a hash means the same on every machine that shares a cache.
        self._pack = struct.Struct(f"<{block_size}I").pack

    def hash_of(self, block_index: int) -> bytes:
        """Of the block of tokens ``[block_index * block_size, (block_index + 1) * block_size)``, which must be full."""
        hashes = self._hashes
        for index in range(len(hashes), block_index + 1):
            tokens = self.tokens_of(index)
            parent = hashes[-1] if hashes else self._root
            hashes.append(blake2b(parent + self._pack(*tokens), digest_size=HASH_BYTES).digest())
        return hashes[block_index]

    def tokens_of(self, block_index: int) -> list[int]:
        return self._token_ids[block_index * self.block_size : (block_index + 1) * self.block_size]
