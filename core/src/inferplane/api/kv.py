"""What a layer keeps between steps. Free of torch: dtypes are names, sizes are bytes.

The core decides *how many* blocks there are and who owns them; the attention backend decides how a block
lies in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Memory that one layer needs for each block of ``block_size`` tokens."""

    block_size: int
    """Tokens per block."""

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


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    num_kv_heads: int
    """On this rank."""
    head_dim: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


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


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalSpec(AttentionSpec):
    """The sequence is cut into chunks of ``chunk`` tokens; a token sees the earlier ones of its own chunk only."""

    chunk: int

    def __post_init__(self) -> None:
        _check_positive(self, "chunk")

    def first_visible_token(self, position: int) -> int:
        return position // self.chunk * self.chunk


def _check_positive(spec: KVCacheSpec, name: str) -> None:
    if (value := getattr(spec, name)) < 1:
        raise ValueError(f"{type(spec).__name__}.{name} must be at least 1 token, got {value}")


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share block tables: the same block id is valid in the tensor of each of them."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    @property
    def block_bytes(self) -> int:
        """Of one block id, over all layers of the group."""
        return self.spec.block_bytes * len(self.layer_names)


@dataclass(frozen=True)
class KVCacheConfig:
    """The pool: one id space of ``num_blocks`` blocks, drawn on by every group."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...] = field(default_factory=tuple)
