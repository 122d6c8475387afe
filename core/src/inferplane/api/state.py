"""Layers that keep a state of fixed size in place of keys and values: how they find it, and what a step is to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from inferplane.api.attention import AttentionInputs
    from inferplane.api.kv import StateSpec


@dataclass(frozen=True, kw_only=True)
class StateLayer:
    """One layer with a state on this rank, as the runner needs to know it."""

    name: str
    spec: StateSpec


@dataclass(frozen=True)
class StateRound:
    """Segments of one length, none of which needs what another of them leaves.

    Segment i is the rows ``rows[i]`` of the step. It goes on from the state in block ``reads[i]``, or from none where
    ``is_first[i]``, and leaves the state after it in block ``writes[i]``, which may be the same block.
    """

    rows: torch.Tensor
    """[num_segments, length] int64"""
    reads: torch.Tensor
    """[num_segments] int64"""
    writes: torch.Tensor
    """[num_segments] int64"""
    is_first: torch.Tensor
    """[num_segments] bool"""


def state_rounds(inputs: AttentionInputs) -> tuple[StateRound, ...]:
    """The tokens of a step, cut into segments where a request changes and where a block of its states is full.

    Rounds run in order: what a segment of a request leaves is what its next one starts from, in a later round. If there
    is one round only, its rows are those of the step in their order. All on the device of the inputs, which are of a
    group of state layers.
    """
    import torch

    if inputs.for_graph:
        return (_decode_round(inputs),)
    size, device = inputs.block_size, inputs.block_table.device
    segments: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    row = 0
    for request, (query_len, end) in enumerate(zip(inputs.query_lens_host, inputs.seq_lens_host)):
        at, number = end - query_len, 0
        while at < end:
            until = min(end, (at // size + 1) * size)
            segment = (row, request, max(at - 1, 0) // size, (until - 1) // size, at == 0)
            segments.setdefault((number, until - at), []).append(segment)
            row, at, number = row + until - at, until, number + 1
    rounds = []
    for (_, length), members in sorted(segments.items()):
        first_rows, requests, reads, writes, is_first = torch.tensor(list(zip(*members)), device=device)
        rounds.append(
            StateRound(
                rows=first_rows.unsqueeze(1) + torch.arange(length, device=device),
                reads=inputs.block_table[requests, reads].long(),
                writes=inputs.block_table[requests, writes].long(),
                is_first=is_first.bool(),
            )
        )
    return tuple(rounds)


def refresh_rounds(rounds: tuple[StateRound, ...], inputs: AttentionInputs) -> None:
    """Brings what `state_rounds` made for a graph to what the persistent tensors of ``inputs`` hold now."""
    [kept], now = rounds, _decode_round(inputs)
    kept.reads.copy_(now.reads)
    kept.writes.copy_(now.writes)
    kept.is_first.copy_(now.is_first)


def _decode_round(inputs: AttentionInputs) -> StateRound:
    """One token for each request, of lengths that only the device knows."""
    import torch

    last = inputs.seq_lens.long() - 1
    table, size = inputs.block_table.long(), inputs.block_size
    return StateRound(
        rows=torch.arange(inputs.num_reqs, device=last.device).unsqueeze(1),
        reads=table.gather(1, (last - 1).clamp(min=0).div(size, rounding_mode="floor").unsqueeze(1)).squeeze(
            1
        ),
        writes=table.gather(1, last.div(size, rounding_mode="floor").unsqueeze(1)).squeeze(1),
        is_first=last == 0,
    )


def allocate_states(spec: StateSpec, num_blocks: int, device: torch.device) -> torch.Tensor:
    """The memory of one layer: ``[num_blocks, block_bytes]`` uint8, uninitialised; a block is one piece."""
    import torch

    return torch.empty(num_blocks, spec.block_bytes, dtype=torch.uint8, device=device)


def state_views(memory: torch.Tensor, spec: StateSpec) -> tuple[torch.Tensor, ...]:
    """The tensors of all states, ``[num_blocks, *shape]`` each, in the memory of `allocate_states`."""
    import torch

    views, offset = [], 0
    for shape, dtype, num_bytes in zip(spec.shapes, spec.dtypes, spec.tensor_bytes):
        kind: torch.dtype = getattr(torch, dtype)
        used = math.prod(shape) * kind.itemsize
        views.append(memory[:, offset : offset + used].view(kind).view(len(memory), *shape))
        offset += num_bytes
    return tuple(views)
