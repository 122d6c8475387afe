"""Steps of attention made by hand: ragged requests over shuffled blocks, on any device."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from inferplane.api.attention import AttentionInputs


def ragged_inputs(
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    block_size: int,
    num_blocks: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> AttentionInputs:
    """A step in which request i computes ``query_lens[i]`` tokens after ``context_lens[i]`` that are stored already.

    The same seed, block size and number of requests give a request the same first blocks, so that a step of contexts
    ``[0, …]`` and queries ``context_lens`` stores what the step then finds.
    """
    seq_lens = [context + query for context, query in zip(context_lens, query_lens)]
    ids = list(range(num_blocks))
    random.Random(seed).shuffle(ids)
    share = num_blocks // len(seq_lens)
    blocks = [ids[i * share : (i + 1) * share] for i in range(len(seq_lens))]
    assert all(share * block_size >= length for length in seq_lens), "too few blocks"
    slots = [
        blocks[i][t // block_size] * block_size + t % block_size
        for i, (context, length) in enumerate(zip(context_lens, seq_lens))
        for t in range(context, length)
    ]
    starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    return AttentionInputs(
        num_reqs=len(query_lens),
        num_tokens=sum(query_lens),
        query_lens_host=list(query_lens),
        seq_lens_host=seq_lens,
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_table=torch.tensor(blocks, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        block_size=block_size,
    )
