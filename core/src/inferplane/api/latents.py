"""Prompts whose heads attend to keys and values of their own, where only the latents of these are kept.

Attention over latents (`inferplane.api.kv.MLAAttentionSpec`) can be computed in two ways, with the same result.
Absorbed, every head attends to the latents themselves: nothing is made of them, but each pair of a query and a key
costs products over the whole latent, twice. Expanded, each head's keys and values are made of the latents first, once
for all queries, and a pair costs products over the head's own dimensions, which are several times fewer. So a single
token is computed absorbed, and a prompt expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from inferplane.api.attention import AttentionInputs, LatentHeads
from inferplane.api.kv import MLAAttentionSpec

LEAST_EXPANDED_TOKENS = 32
"""New tokens of a step below which the products saved are not worth the launches of more kernels."""


@dataclass(frozen=True)
class ExpandedPrompts:
    """Requests at the end of a step that a layer computes expanded. Their sequences lie one after another."""

    num_tokens: int
    """New tokens of them all: the last rows of the step."""
    slots: torch.Tensor
    """[num_tokens] int64, on the device: where their latents are stored."""
    query_lens: Sequence[int]
    query_starts: torch.Tensor
    """[num_reqs + 1] int32, on the device: of each request's new tokens among ``num_tokens``."""
    key_slots: torch.Tensor
    """[num_keys] int64, on the device: where the latents of all tokens of their sequences are stored."""
    key_lens: Sequence[int]
    key_starts: torch.Tensor
    """[num_reqs + 1] int32, on the device: of each sequence among ``num_keys``."""


@dataclass(frozen=True)
class StepCut:
    """Cuts steps of a group of layers that keep latents: what lies before the cut is absorbed, what lies behind it is
    expanded. The cut is where the step takes the fewest products."""

    spec: MLAAttentionSpec
    heads: LatentHeads

    def __call__(self, inputs: AttentionInputs) -> tuple[AttentionInputs, ExpandedPrompts | None]:
        """The inputs of the requests before the cut, as views, and those behind it; None where there are none."""
        first = self.first_expanded(inputs.query_lens_host, inputs.seq_lens_host)
        if first == inputs.num_reqs:
            return inputs, None
        query_lens, key_lens = inputs.query_lens_host[first:], inputs.seq_lens_host[first:]
        num_before = inputs.num_tokens - sum(query_lens)
        before = replace(
            inputs,
            num_reqs=first,
            num_tokens=num_before,
            query_lens_host=inputs.query_lens_host[:first],
            seq_lens_host=inputs.seq_lens_host[:first],
            query_start=inputs.query_start[: first + 1],
            seq_lens=inputs.seq_lens[:first],
            block_table=inputs.block_table[:first],
            slot_mapping=inputs.slot_mapping[:num_before],
        )
        ends = inputs.seq_lens[first:].cumsum(0, dtype=torch.int32)
        prompts = ExpandedPrompts(
            num_tokens=sum(query_lens),
            slots=inputs.slot_mapping[num_before:],
            query_lens=query_lens,
            query_starts=inputs.query_start[first:] - num_before,
            key_slots=torch.cat([_slots(inputs, index) for index in range(first, inputs.num_reqs)]),
            key_lens=key_lens,
            key_starts=torch.nn.functional.pad(ends, (1, 0)),
        )
        return before, prompts

    def first_expanded(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
        """The first request behind the cut; the number of requests where none is. A request has the last
        ``query_lens[i]`` of ``seq_lens[i]`` tokens in the step."""
        cut, saved, most_saved, num_tokens = len(query_lens), 0, 0, 0
        for index in reversed(range(len(query_lens))):
            num_tokens += query_lens[index]
            saved += self.products_saved(query_lens[index], seq_lens[index])
            if saved > most_saved and num_tokens >= LEAST_EXPANDED_TOKENS:
                cut, most_saved = index, saved
        return cut

    def products_saved(self, query_len: int, seq_len: int) -> int:
        """By one head, when the last ``query_len`` of ``seq_len`` tokens are expanded; less than 0 where absorbed is
        cheaper."""
        rank, rope_dim = self.spec.latent_rank, self.spec.rope_dim
        own_dims = self.heads.nope_dim + self.heads.value_dim
        pairs = query_len * seq_len - query_len * (query_len - 1) // 2
        absorbed = pairs * (2 * rank + rope_dim) + query_len * rank * own_dims
        expanded = pairs * (own_dims + rope_dim) + seq_len * rank * own_dims
        return absorbed - expanded


def _slots(inputs: AttentionInputs, index: int) -> torch.Tensor:
    """Of all tokens of a request's sequence: ``[seq_len]`` int64."""
    seq_len, block_size = inputs.seq_lens_host[index], inputs.block_size
    blocks = inputs.block_table[index, : -(-seq_len // block_size)].long()
    offsets = torch.arange(block_size, device=blocks.device)
    return (blocks.unsqueeze(1) * block_size + offsets).flatten()[:seq_len]
