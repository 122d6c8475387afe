"""What one step of paged attention has to do, worked out once and used by every layer of the step.

The KV tensor of a layer is ``[2, num_kv_heads, num_blocks, block_size, head_dim]``: keys, then values, and within each
head all *slots* (``block_id * block_size + offset``) in a row. A request in consecutive blocks is then a plain slice.
Half of it, keys or values, is also seen as rows ``[num_kv_heads * num_slots, head_dim]``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

CHUNK_BYTES = 8 << 20
"""Keys, in float32, that are gathered at a time: enough that calls cost little, little enough to stay in cache."""

QUERY_TILE = 256
"""Queries of one product when a prompt continues; the mask is this high, and as wide as the longest sequence."""


@dataclass(frozen=True)
class KVShape:
    """Of one layer's KV tensor, and how many query heads read it."""

    num_heads: int
    num_kv_heads: int
    num_slots: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, kv: torch.Tensor, num_heads: int) -> KVShape:
        _, num_kv_heads, num_blocks, block_size, head_dim = kv.shape
        return cls(num_heads, num_kv_heads, num_blocks * block_size, block_size, head_dim, kv.dtype)


@dataclass(frozen=True)
class Slice:
    """A request whose tokens lie in consecutive slots."""

    first_slot: int
    length: int


@dataclass(frozen=True)
class Rows:
    """A request whose tokens lie anywhere: its rows in keys and, ``num_kv_heads * num_slots`` further, in values.

    ``both: [2 * num_kv_heads * length]``, ordered ``[2, num_kv_heads, length]``.
    """

    both: torch.Tensor
    length: int


@dataclass(frozen=True)
class DecodeGroup:
    """Requests of similar length with one query each; all are read as ``max_len`` long.

    What pads a shorter one are rows of its own first token. That token is always written, so the padding is finite
    wherever the request itself is: a weight of zero times what was left in an unwritten slot could be NaN.
    """

    num_reqs: int
    max_len: int
    rows: torch.Tensor
    """Of keys, and of values, for each query head: ``[num_reqs * num_heads * max_len]`` int64."""
    row_starts: torch.Tensor
    """Where each query head's rows begin in ``rows``: ``[num_reqs * num_heads]`` int64."""
    mask: torch.Tensor | None
    """Added to scores: ``[num_reqs, 1, max_len]`` float32; None when all lengths are equal."""
    scores: torch.Tensor | None
    """Sparse CSR ``[num_reqs * num_heads, num_kv_heads * num_slots]`` over ``rows``, written by each layer anew but
    never with infinity; None where keys are gathered instead."""
    key_rows: torch.Tensor | None
    """The opposite case: ``[num_reqs * num_kv_heads * max_len]``, each row once for all queries of its head."""


@dataclass(frozen=True)
class FreshPrompts:
    """Neighbours in the batch with nothing stored before this step, all of one length."""

    first_token: int
    num_reqs: int
    query_len: int


@dataclass(frozen=True)
class Continuation:
    """A request with several queries and a stored past."""

    first_token: int
    query_len: int
    stored: Slice | Rows


@dataclass(frozen=True)
class AttentionPlan:
    """One step."""

    store_rows: torch.Tensor
    """For each token and head its row in keys, and in values: ``[num_tokens * num_kv_heads]`` int64."""
    decodes: list[Slice | DecodeGroup]
    decode_tokens: torch.Tensor | None
    """Token rows in the order of ``decodes``; None when that is every token of the step in its own order."""
    fresh: list[FreshPrompts]
    continuations: list[Continuation]
    causal_mask: torch.Tensor | None
    """For continuations, ``[QUERY_TILE, longest]`` in the queries' dtype: its lower right corner fits every tile."""


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    shape: KVShape,
) -> AttentionPlan:
    """Sorts the requests of a step into kinds of work.

    ``block_table: [num_reqs, >= blocks]`` integers, ``slot_mapping: [num_tokens]`` int64, one slot for each token.
    Request i has the next ``query_lens[i]`` tokens of the batch, the last of its ``seq_lens[i]``.
    """
    decodes: list[int] = []
    fresh: list[FreshPrompts] = []
    continuations: list[Continuation] = []
    first_tokens: list[int] = []
    num_tokens = 0
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens)):
        first_tokens.append(num_tokens)
        if query_len == 1:
            decodes.append(index)
        elif query_len == seq_len:
            _add_fresh(fresh, num_tokens, query_len)
        else:
            stored = _locate(block_table[index], seq_len, shape)
            continuations.append(Continuation(num_tokens, query_len, stored))
        num_tokens += query_len
    decodes.sort(key=lambda index: -seq_lens[index])
    tokens = [first_tokens[index] for index in decodes]
    heads = torch.arange(shape.num_kv_heads) * shape.num_slots
    longest = max((seq for query, seq in zip(query_lens, seq_lens) if query < seq), default=0)
    return AttentionPlan(
        store_rows=(slot_mapping.unsqueeze(1) + heads).flatten(),
        decodes=_group(decodes, seq_lens, block_table, shape),
        decode_tokens=None if tokens == list(range(num_tokens)) else torch.tensor(tokens),
        fresh=fresh,
        continuations=continuations,
        causal_mask=_causal_mask(longest, shape.dtype) if continuations else None,
    )


def _add_fresh(fresh: list[FreshPrompts], first_token: int, query_len: int) -> None:
    if fresh:
        last = fresh[-1]
        if last.query_len == query_len and last.first_token + last.num_reqs * query_len == first_token:
            fresh[-1] = FreshPrompts(last.first_token, last.num_reqs + 1, query_len)
            return
    fresh.append(FreshPrompts(first_token, 1, query_len))


def _locate(blocks: torch.Tensor, length: int, shape: KVShape) -> Slice | Rows:
    if (run := _consecutive(blocks, length, shape)) is not None:
        return run
    slots = _slots(blocks.unsqueeze(0), length, shape)
    heads = torch.arange(2 * shape.num_kv_heads).unsqueeze(1) * shape.num_slots
    return Rows((heads + slots).flatten(), length)


def _consecutive(blocks: torch.Tensor, length: int, shape: KVShape) -> Slice | None:
    num_blocks = -(-length // shape.block_size)
    ids = blocks[:num_blocks].tolist()
    if ids != list(range(ids[0], ids[0] + num_blocks)):
        return None
    return Slice(ids[0] * shape.block_size, length)


def _group(
    decodes: list[int], seq_lens: Sequence[int], block_table: torch.Tensor, shape: KVShape
) -> list[Slice | DecodeGroup]:
    """Cuts requests, longest first, into groups that are padded by a third at most."""
    samples = shape.dtype == torch.float32 and can_sample()
    most_tokens = max(seq_lens, default=0) * len(decodes)
    if not samples:
        most_tokens = CHUNK_BYTES // (shape.num_kv_heads * shape.head_dim * 4)
    groups: list[Slice | DecodeGroup] = []
    start = 0
    while start < len(decodes):
        longest = seq_lens[decodes[start]]
        end = start + 1
        while (
            end < len(decodes)
            and (end + 1 - start) * longest <= most_tokens
            and seq_lens[decodes[end]] * 4 >= longest * 3
        ):
            end += 1
        members = decodes[start:end]
        run = _consecutive(block_table[members[0]], longest, shape) if len(members) == 1 else None
        lens = [seq_lens[index] for index in members]
        groups.append(run or _decode_group(block_table[torch.tensor(members)], lens, shape, samples))
        start = end
    return groups


def _decode_group(blocks: torch.Tensor, lens: list[int], shape: KVShape, samples: bool) -> DecodeGroup:
    num_reqs, max_len = len(lens), max(lens)
    slots, mask = _slots(blocks, max_len, shape), None
    if min(lens) != max_len:
        is_padding = torch.arange(max_len) >= torch.tensor(lens).unsqueeze(1)
        slots = torch.where(is_padding, slots[:, :1], slots)
        mask = torch.zeros(is_padding.shape).masked_fill_(is_padding, float("-inf")).unsqueeze(1)
    heads = torch.arange(shape.num_kv_heads).unsqueeze(1) * shape.num_slots
    key_rows = slots.unsqueeze(1) + heads
    rows = key_rows.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1).flatten()
    starts = torch.arange(num_reqs * shape.num_heads + 1) * max_len
    scores = None
    if samples:
        size = (num_reqs * shape.num_heads, shape.num_kv_heads * shape.num_slots)
        scores = torch.sparse_csr_tensor(
            starts, rows, torch.zeros(rows.shape), size=size, check_invariants=False
        )
    return DecodeGroup(
        num_reqs, max_len, rows, starts[:-1], mask, scores, None if samples else key_rows.flatten()
    )


def _slots(blocks: torch.Tensor, length: int, shape: KVShape) -> torch.Tensor:
    """``[num_reqs, blocks] -> [num_reqs, length]`` int64"""
    num_blocks = -(-length // shape.block_size)
    first = blocks[:, :num_blocks].to(torch.int64) * shape.block_size
    return (first.unsqueeze(2) + torch.arange(shape.block_size)).flatten(1)[:, :length]


def _causal_mask(longest: int, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(QUERY_TILE, max(longest, QUERY_TILE), dtype=dtype)
    mask[:, -QUERY_TILE:] = torch.full((QUERY_TILE, QUERY_TILE), float("-inf"), dtype=dtype).triu_(1)
    return mask


@cache
def can_sample() -> bool:
    """Whether torch multiplies at chosen places only, as `decode_scores` needs. Found out by trying.

    Rows may repeat and stand in any order, which torch's own checks of a sparse tensor would not have; the product
    does not mind, and this makes sure of it.
    """
    starts, columns = torch.tensor([0, 3, 6]), torch.tensor([2, 0, 2, 1, 1, 0])
    left, right = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0], [9.0, 10.0]])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says once that sparse tensors are in beta
            scores = torch.sparse_csr_tensor(
                starts, columns, torch.full((6,), 7.0), (2, 3), check_invariants=False
            )
            torch.sparse.sampled_addmm(scores, left, right.T, beta=0.0, alpha=2.0, out=scores)
    except (RuntimeError, AttributeError, TypeError):
        return False
    want = 2 * (left @ right.T)[torch.tensor([0, 0, 0, 1, 1, 1]), columns]
    return torch.equal(scores.values(), want)
