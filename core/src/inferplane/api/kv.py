"""What a layer keeps between steps. Free of torch: dtypes are names, sizes are bytes.

The core decides *how many* blocks there are and who owns them; the attention backend decides how a block
lies in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_KV = ("fp8_e4m3", "fp8_e5m2", "int8_per_token_head")
"""KV dtypes that are no types of activations: one byte a number. fp8 has scales of the layer (`KVScales`); int8 has a
float32 for each token and head, which is stored with it."""
KV_DTYPE_BYTES = {**DTYPE_BYTES, **dict.fromkeys(QUANTIZED_KV, 1)}
KV_SCALE_BYTES = {"int8_per_token_head": 4}
"""Beside the numbers of each token and head."""
STATE_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Memory that one layer needs for each block of ``block_size`` tokens, and how long it is needed.

    A plugin that brings a spec of its own brings its manager too (`inferplane.api.kv_manager`), unless that of a
    class which it derives from does.
    """

    block_size: int
    """Tokens per block."""
    layout: str = ""
    """How a backend arranges a block: layers share memory only if this is equal. Filled by the worker."""

    @property
    def block_bytes(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must say how many bytes a block takes")

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill."""
        return -(-num_tokens // self.block_size)

    def first_visible_token(self, position: int) -> int:
        """The earliest token whose cached content the token at ``position`` needs; what lies before it is read by
        no token from there on."""
        return 0

    @property
    def max_visible_tokens(self) -> int | None:
        """The most tokens, itself included, that any token needs; None where that grows with the sequence."""
        return None

    @property
    def sees_later_tokens(self) -> bool:
        """Whether a token sees those behind it, too: then a sequence is computed in one step, or not at all."""
        return False

    def max_num_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """The most blocks that a request holds at any moment while it grows to ``num_tokens``, by at most
        ``max_step_tokens`` in a step: those that the first token of the step sees, and those that the step fills.
        """
        num_blocks = self.num_blocks_for(num_tokens)
        if self.max_visible_tokens is None:
            return num_blocks
        num_seen = self.num_blocks_for(self.max_visible_tokens - 1)
        return min(num_blocks, num_seen + 1 + self.num_blocks_for(max_step_tokens - 1))


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """A key and a value for each token and KV head."""

    num_kv_heads: int
    """On this rank."""
    head_dim: int
    dtype: str
    """How numbers are stored: a key of `KV_DTYPE_BYTES`."""

    @property
    def row_bytes(self) -> int:
        """Of one key, or one value, of one head."""
        return self.head_dim * KV_DTYPE_BYTES[self.dtype] + KV_SCALE_BYTES.get(self.dtype, 0)

    @property
    def block_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Keys and values of every token, for as long as the request lives."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A token sees itself and the ``window - 1`` tokens before it (arXiv:2004.05150)."""

    window: int

    def __post_init__(self) -> None:
        _check_positive(self, "window")

    def first_visible_token(self, position: int) -> int:
        return max(0, position - self.window + 1)

    @property
    def max_visible_tokens(self) -> int:
        return self.window


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalSpec(AttentionSpec):
    """The sequence is cut into chunks of ``chunk`` tokens; a token sees the earlier ones of its own chunk only."""

    chunk: int

    def __post_init__(self) -> None:
        _check_positive(self, "chunk")

    def first_visible_token(self, position: int) -> int:
        return position // self.chunk * self.chunk

    @property
    def max_visible_tokens(self) -> int:
        return self.chunk


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(AttentionSpec):
    """Multi-head latent attention (arXiv:2405.04434): one vector for each token, and no value beside it.

    Its first ``latent_rank`` numbers are the compressed latent, which is key and value of every head at once; the last
    ``rope_dim`` are the rotated part of the key. It is the same on every rank.
    """

    num_kv_heads: int = 1
    rope_dim: int

    def __post_init__(self) -> None:
        if self.num_kv_heads != 1:
            raise ValueError(
                f"MLA keeps one vector for all heads: num_kv_heads is 1, not {self.num_kv_heads}"
            )
        if not 0 <= self.rope_dim < self.head_dim:
            raise ValueError(f"rope_dim {self.rope_dim} is no part of head_dim {self.head_dim}")

    @property
    def latent_rank(self) -> int:
        return self.head_dim - self.rope_dim

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Keys and values of the encoder's tokens: as many as the request's input has, from its first step to its end."""


@dataclass(frozen=True, kw_only=True)
class EncoderAttentionSpec(KVCacheSpec):
    """Attention without a cache: every token sees the whole sequence (arXiv:1810.04805), and nothing is kept of it.

    It belongs to no group and has no blocks. What it says to the scheduler is `sees_later_tokens`.
    """

    block_size: int = 1
    window: int | None = None
    """A token sees those at most so far from it, on either side; None where it sees all."""

    def __post_init__(self) -> None:
        if self.window is not None:
            _check_positive(self, "window")

    @property
    def block_bytes(self) -> int:
        return 0

    def num_blocks_for(self, num_tokens: int) -> int:
        return 0

    @property
    def sees_later_tokens(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class StateSpec(KVCacheSpec):
    """A state of fixed size that stands for all tokens so far.

    A block is one state: block ``i`` of a request holds the state after the tokens up to ``(i + 1) * block_size``, or
    after all of them as long as they are fewer. So the last block is the running state, and a full one a checkpoint at
    which another request can start. ``block_size`` is the distance of the checkpoints.
    """

    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors that make up one state, on this rank."""
    dtypes: tuple[str, ...]
    """One for each shape."""

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.dtypes) or not self.shapes:
            raise ValueError(
                f"a state has a dtype for each shape, not {len(self.dtypes)} for {len(self.shapes)}"
            )

    @cached_property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Of each tensor of one state, rounded up so that the next begins where any dtype may."""
        sizes = (math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(self.shapes, self.dtypes))
        return tuple(-(-size // STATE_ALIGNMENT_BYTES) * STATE_ALIGNMENT_BYTES for size in sizes)

    @property
    def block_bytes(self) -> int:
        return sum(self.tensor_bytes)

    def first_visible_token(self, position: int) -> int:
        return max(0, position - 1)

    @property
    def max_visible_tokens(self) -> int:
        return 2


@dataclass(frozen=True, kw_only=True)
class MambaSpec(StateSpec):
    """A window of the convolution's inputs and the state of a selective state space (arXiv:2312.00752, 2405.21060)."""


@dataclass(frozen=True, kw_only=True)
class LinearAttentionSpec(StateSpec):
    """A matrix of keys times values for each head, with or without a convolution's window (arXiv:2412.06464)."""


def _check_positive(spec: KVCacheSpec, name: str) -> None:
    if (value := getattr(spec, name)) < 1:
        raise ValueError(f"{type(spec).__name__}.{name} must be at least 1 token, got {value}")


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share block tables: the same block id is valid in the memory of each of them."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    pool: int = 0
    """The pool that its blocks come from. The n-th layers of all groups of one pool share their memory."""


@dataclass(frozen=True)
class KVCacheConfig:
    """The pools of blocks, and the groups that draw on them."""

    num_blocks: int
    """Of the first pool, the only one where all layers keep blocks of one shape."""
    groups: tuple[KVCacheGroup, ...] = field(default_factory=tuple)
    more_pools: tuple[int, ...] = ()
    """Blocks of each further pool."""
    kept_blocks: tuple[int, ...] = ()
    """Of each pool, blocks to use before a cached one is evicted; empty for all. Requests that run may use more."""

    @property
    def pool_blocks(self) -> tuple[int, ...]:
        """Blocks of every pool; none where no layer keeps anything."""
        return (self.num_blocks, *self.more_pools) if self.groups else ()

    def memory(self) -> list[tuple[int, tuple[str, ...]]]:
        """For each piece of memory the blocks that it holds and the layers that share it."""
        pieces = []
        for pool, num_blocks in enumerate(self.pool_blocks):
            groups = [group.layer_names for group in self.groups if group.pool == pool]
            for index in range(max(map(len, groups), default=0)):
                pieces.append((num_blocks, tuple(names[index] for names in groups if index < len(names))))
        return pieces
