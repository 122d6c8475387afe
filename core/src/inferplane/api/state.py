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
class StateSegments:
    """The tokens of a step, cut where a request changes and where a block of its states is full.

    Segment i is the rows ``starts[i]`` to ``starts[i + 1]``. It goes on from the state in block ``reads[i]``, or from
    none where ``is_first[i]``, and leaves the state after it in block ``writes[i]``, which may be the same block. What
    an earlier segment of the request wrote is what its next one reads, so they run in order.
    """

    starts: torch.Tensor
    """[num_segments + 1] int32"""
    reads: torch.Tensor
    """[num_segments] int64"""
    writes: torch.Tensor
    """[num_segments] int64"""
    is_first: torch.Tensor
    """[num_segments] bool"""


def state_segments(inputs: AttentionInputs) -> StateSegments:
    """Of a group of state layers, on the device of the inputs."""
    import torch

    size, device = inputs.block_size, inputs.block_table.device
    starts, requests, reads, writes, is_first = [0], [], [], [], []
    for request, (query_len, end) in enumerate(zip(inputs.query_lens_host, inputs.seq_lens_host)):
        at = end - query_len
        while at < end:
            until = min(end, (at // size + 1) * size)
            starts.append(starts[-1] + until - at)
            requests.append(request)
            reads.append(max(at - 1, 0) // size)
            writes.append((until - 1) // size)
            is_first.append(at == 0)
            at = until
    rows, from_index, to_index = torch.tensor([requests, reads, writes], device=device)
    return StateSegments(
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        reads=inputs.block_table[rows, from_index].long(),
        writes=inputs.block_table[rows, to_index].long(),
        is_first=torch.tensor(is_first, device=device),
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
