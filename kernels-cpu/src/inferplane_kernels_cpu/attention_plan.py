"""What one step of paged attention has to do, worked out once and used by every layer of the step.

The KV tensor of a layer is ``[2, num_kv_heads, num_blocks, block_size, head_dim]``: keys, then values, and within each
head all *slots* (``block_id * block_size + offset``) in a row. A request in consecutive blocks is then a plain slice.
Half of it, keys or values, is also seen as rows ``[num_kv_heads * num_slots, head_dim]``. Where keys are values, too
(latents), there is one half only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

CHUNK_BYTES = 8 << 20
"""Keys, in float32, that are gathered at a time: enough that calls cost little, little enough to stay in cache."""

QUERY_TILE = 256
"""Queries of one product when a prompt continues; the mask is this high, and as wide as the longest sequence."""

FirstVisible = Callable[[int], int]
"""The earliest token that the token at a position sees; it sees all from there up to itself. Never falls."""


def sees_all(position: int) -> int:
    return 0


@dataclass(frozen=True)
class KVShape:
    """Of one layer's KV tensor, and how many query heads read it."""

    num_halves: int
    """1 where keys are values, too."""
    num_heads: int
    num_kv_heads: int
    num_slots: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, kv: torch.Tensor, num_heads: int) -> KVShape:
        halves, num_kv_heads, num_blocks, block_size, head_dim = kv.shape
        return cls(halves, num_heads, num_kv_heads, num_blocks * block_size, block_size, head_dim, kv.dtype)


@dataclass(frozen=True)
class Slice:
    """The seen tokens of a request, which lie in consecutive slots."""

    first_slot: int
    length: int


@dataclass(frozen=True)
class Rows:
    """The seen tokens of a request, which lie anywhere: their rows in keys and, ``num_kv_heads * num_slots`` further,
    in values.

    ``both: [num_halves * num_kv_heads * length]``, ordered ``[num_halves, num_kv_heads, length]``.
    """

    both: torch.Tensor
    length: int


@dataclass(frozen=True)
class DecodeGroup:
    """Requests that see a similar number of tokens with one query each; all are read as ``max_len`` long.

    What pads a shorter one are rows of its own first seen token. That token is always written, so the padding is finite
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
class Tile:
    """Queries of one product, as rows of the step, and what they see, as a part of what is fetched."""

    first_query: int
    end_query: int
    first_key: int
    end_key: int
    mask: torch.Tensor
    """Added to scores: ``[queries, keys]``, 0 or minus infinity, in the queries' dtype."""


@dataclass(frozen=True)
class Continuation:
    """A request with several queries, and the tokens that any of them sees."""

    stored: Slice | Rows
    tiles: list[Tile]


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


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    shape: KVShape,
    first_visible: FirstVisible = sees_all,
    may_fuse: bool = True,
) -> AttentionPlan:
    """Sorts the requests of a step into kinds of work.

    ``block_table: [num_reqs, >= blocks]`` integers, ``slot_mapping: [num_tokens]`` int64, one slot for each token.
    Request i has the next ``query_lens[i]`` tokens of the batch, the last of its ``seq_lens[i]``. Blocks of tokens that
    no query sees are not looked at. Without ``may_fuse`` there are no `FreshPrompts`.
    """
    decodes: list[int] = []
    fresh: list[FreshPrompts] = []
    continuations: list[Continuation] = []
    first_tokens: list[int] = []
    masks = _Masks(max(seq_lens, default=0), shape.dtype)
    num_tokens = 0
    for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens)):
        first_tokens.append(num_tokens)
        if query_len == 1:
            decodes.append(index)
        elif query_len == seq_len and may_fuse and first_visible(seq_len - 1) == 0:
            _add_fresh(fresh, num_tokens, query_len)
        else:
            start = first_visible(seq_len - query_len)
            stored = _locate(block_table[index], start, seq_len, shape)
            tiles = _tiles(num_tokens, query_len, seq_len, first_visible, masks)
            continuations.append(Continuation(stored, tiles))
        num_tokens += query_len
    starts = [first_visible(seq_len - 1) for seq_len in seq_lens]
    decodes.sort(key=lambda index: starts[index] - seq_lens[index])
    tokens = [first_tokens[index] for index in decodes]
    heads = torch.arange(shape.num_kv_heads) * shape.num_slots
    return AttentionPlan(
        store_rows=(slot_mapping.unsqueeze(1) + heads).flatten(),
        decodes=_group(decodes, starts, seq_lens, block_table, shape),
        decode_tokens=None if tokens == list(range(num_tokens)) else torch.tensor(tokens),
        fresh=fresh,
        continuations=continuations,
    )


def _add_fresh(fresh: list[FreshPrompts], first_token: int, query_len: int) -> None:
    if fresh:
        last = fresh[-1]
        if last.query_len == query_len and last.first_token + last.num_reqs * query_len == first_token:
            fresh[-1] = FreshPrompts(last.first_token, last.num_reqs + 1, query_len)
            return
    fresh.append(FreshPrompts(first_token, 1, query_len))


def _tiles(
    first_row: int, query_len: int, seq_len: int, first_visible: FirstVisible, masks: _Masks
) -> list[Tile]:
    """Each with the keys up to its own last query and no further, from the first that one of its queries sees."""
    past_len = seq_len - query_len
    fetched_from = first_visible(past_len)
    tiles = []
    for first in range(0, query_len, QUERY_TILE):
        last = min(first + QUERY_TILE, query_len)
        lowest = [first_visible(position) for position in range(past_len + first, past_len + last)]
        num_keys = past_len + last - lowest[0]
        mask = masks.make([low - lowest[0] for low in lowest], num_keys)
        start = lowest[0] - fetched_from
        tiles.append(Tile(first_row + first, first_row + last, start, start + num_keys, mask))
    return tiles


class _Masks:
    """Of one step. Where only the future is hidden, the lower right corner of one mask fits every tile."""

    def __init__(self, longest: int, dtype: torch.dtype) -> None:
        self._longest = longest
        self._dtype = dtype
        self._causal: torch.Tensor | None = None

    def make(self, num_hidden: list[int], num_keys: int) -> torch.Tensor:
        """``[len(num_hidden), num_keys]``: query i does not see the first ``num_hidden[i]`` keys, and the last query
        sees all behind its own."""
        num_queries = len(num_hidden)
        if num_hidden[-1] == 0:
            if self._causal is None:
                self._causal = _causal_mask(self._longest, self._dtype)
            return self._causal[-num_queries:, -num_keys:]
        keys = torch.arange(num_keys)
        own = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
        is_hidden = (keys > own) | (keys < torch.tensor(num_hidden).unsqueeze(1))
        return torch.zeros(is_hidden.shape, dtype=self._dtype).masked_fill_(is_hidden, float("-inf"))


def _locate(blocks: torch.Tensor, start: int, end: int, shape: KVShape) -> Slice | Rows:
    if (run := _consecutive(blocks, start, end, shape)) is not None:
        return run
    slots = _slots(blocks.unsqueeze(0), [start], end - start, shape)
    heads = torch.arange(shape.num_halves * shape.num_kv_heads).unsqueeze(1) * shape.num_slots
    return Rows((heads + slots).flatten(), end - start)


def _consecutive(blocks: torch.Tensor, start: int, end: int, shape: KVShape) -> Slice | None:
    first, last = start // shape.block_size, -(-end // shape.block_size)
    ids = blocks[first:last].tolist()
    if ids != list(range(ids[0], ids[0] + last - first)):
        return None
    return Slice(ids[0] * shape.block_size + start % shape.block_size, end - start)


def _group(
    decodes: list[int], starts: list[int], ends: Sequence[int], block_table: torch.Tensor, shape: KVShape
) -> list[Slice | DecodeGroup]:
    """Cuts requests, those that see most first, into groups that are padded by a third at most."""
    samples = shape.dtype == torch.float32 and can_sample()
    lens = [end - start for start, end in zip(starts, ends)]
    most_tokens = max(lens, default=0) * len(decodes)
    if not samples:
        most_tokens = CHUNK_BYTES // (shape.num_kv_heads * shape.head_dim * 4)
    groups: list[Slice | DecodeGroup] = []
    at = 0
    while at < len(decodes):
        longest = lens[decodes[at]]
        end = at + 1
        while (
            end < len(decodes)
            and (end + 1 - at) * longest <= most_tokens
            and lens[decodes[end]] * 4 >= longest * 3
        ):
            end += 1
        members = decodes[at:end]
        run = None
        if len(members) == 1:
            run = _consecutive(block_table[members[0]], starts[members[0]], ends[members[0]], shape)
        groups.append(
            run
            or _decode_group(
                block_table[torch.tensor(members)],
                [starts[index] for index in members],
                [lens[index] for index in members],
                shape,
                samples,
            )
        )
        at = end
    return groups


def _decode_group(
    blocks: torch.Tensor, starts: list[int], lens: list[int], shape: KVShape, samples: bool
) -> DecodeGroup:
    num_reqs, max_len = len(lens), max(lens)
    slots, mask = _slots(blocks, starts, max_len, shape), None
    if min(lens) != max_len:
        is_padding = torch.arange(max_len) >= torch.tensor(lens).unsqueeze(1)
        slots = torch.where(is_padding, slots[:, :1], slots)
        mask = torch.zeros(is_padding.shape).masked_fill_(is_padding, float("-inf")).unsqueeze(1)
    heads = torch.arange(shape.num_kv_heads).unsqueeze(1) * shape.num_slots
    key_rows = slots.unsqueeze(1) + heads
    rows = key_rows.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=1).flatten()
    row_starts = torch.arange(num_reqs * shape.num_heads + 1) * max_len
    scores = None
    if samples:
        size = (num_reqs * shape.num_heads, shape.num_kv_heads * shape.num_slots)
        scores = torch.sparse_csr_tensor(
            row_starts, rows, torch.zeros(rows.shape), size=size, check_invariants=False
        )
    return DecodeGroup(
        num_reqs, max_len, rows, row_starts[:-1], mask, scores, None if samples else key_rows.flatten()
    )


def _slots(blocks: torch.Tensor, starts: list[int], length: int, shape: KVShape) -> torch.Tensor:
    """``[num_reqs, blocks] -> [num_reqs, length]`` int64, from token ``starts[i]`` on; past a request's last block the
    slots are some other block's."""
    if not any(starts):
        num_blocks = -(-length // shape.block_size)
        first = blocks[:, :num_blocks].to(torch.int64) * shape.block_size
        return (first.unsqueeze(2) + torch.arange(shape.block_size)).flatten(1)[:, :length]
    tokens = torch.tensor(starts).unsqueeze(1) + torch.arange(length)
    index = (tokens // shape.block_size).clamp_(max=blocks.shape[1] - 1)
    return blocks.gather(1, index).to(torch.int64) * shape.block_size + tokens % shape.block_size


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
