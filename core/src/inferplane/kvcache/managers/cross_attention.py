"""`CrossAttentionManager`: the KV of what an encoder has read, of one length from the first step to the last."""

from __future__ import annotations

from inferplane.kvcache.managers.base import GroupManager
from inferplane.kvcache.prefix import HashChain
from inferplane.kvcache.request_blocks import NEVER, GroupBlocks, GroupPrefix


class CrossAttentionManager(GroupManager):
    """Blocks for the encoder's tokens, all taken at once.

    They are never shared: the tokens of a prompt do not tell what the encoder has read, so a request with an encoder's
    input starts from its first token.
    """

    def max_num_blocks(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        return self.spec.num_blocks_for(num_encoder_tokens)

    def num_missing_blocks(self, blocks: GroupBlocks | GroupPrefix, num_tokens: int) -> int:
        assert isinstance(blocks, GroupBlocks), "a group that finds no prefix has none to start from"
        return self.spec.num_blocks_for(blocks.num_encoder_tokens) - len(blocks.ids)

    def capacity_tokens(self, blocks: GroupBlocks) -> int:
        return NEVER

    def find_cached_prefix(self, chain: HashChain, max_tokens: int) -> GroupPrefix:
        return GroupPrefix(0, [])

    def cache_blocks(self, blocks: GroupBlocks, chain: HashChain, end: int) -> None:
        return

    def settle_at(self, num_computed_tokens: int, is_caching: bool) -> int:
        return NEVER
