"""The attention contract: a backend owns the layout of its KV tensors and computes over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from inferplane.api.device import DeviceDescriptor
    from inferplane.api.kv import KVCacheSpec
    from inferplane.api.kv_dtype import KVScales


@dataclass(frozen=True, kw_only=True)
class LatentHeads:
    """What each head can make of a latent: see `inferplane.api.latents`."""

    nope_dim: int
    """Dimensions of its key that positions do not turn; the key's others are stored beside the latent."""
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One attention layer on this rank, as a backend needs to know it."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on q·k before the softmax."""
    spec: KVCacheSpec
    """What is kept, and which earlier tokens a token sees: `KVCacheSpec.first_visible_token`."""
    soft_cap: float | None = None
    """Scores become ``soft_cap * tanh(score / soft_cap)`` after scaling (arXiv:2408.00118)."""
    has_sinks: bool = False
    """Whether each head has a learned logit that joins the softmax's denominator; `forward` gets them as ``sinks``."""
    kv_scales: KVScales | None = field(default=None, compare=False, repr=False)
    """Exactly where ``spec.dtype`` is an fp8 type."""
    latent_heads: LatentHeads | None = None
    """Of a layer with an `MLAAttentionSpec` that can make heads' own keys and values of its latents."""


@dataclass(frozen=True, kw_only=True)
class AttentionQuery:
    """What a backend is asked whether it can serve."""

    layer: AttentionLayer
    dtype: torch.dtype
    """Of q, k and v."""
    kv_dtype: torch.dtype
    """Of the numbers that are stored; ``layer.spec.dtype`` says all about them."""
    device: DeviceDescriptor


@dataclass(kw_only=True)
class AttentionInputs:
    """What a step looks like to the layers of one KV group. Filled by the runner, read by `build_metadata`.

    Requests lie one after another in the token dimension; request i owns the rows
    ``query_start[i]`` to ``query_start[i + 1]`` of q, k and v, which are the tokens
    ``seq_lens[i] - query_len(i)`` to ``seq_lens[i]`` of its sequence. Attention is causal.

    In a group whose tokens do not see all earlier ones, blocks that no token of this step sees may be gone: their
    entries in the block table are some valid ids, and what lies there may be anything, NaN included.
    """

    num_reqs: int
    num_tokens: int
    query_lens_host: list[int]
    seq_lens_host: list[int]
    """Tokens in the cache after this step's are stored, per request."""
    query_start: torch.Tensor
    """[num_reqs + 1] int32, on the device."""
    seq_lens: torch.Tensor
    """[num_reqs] int32, on the device."""
    block_table: torch.Tensor
    """[num_reqs, max_num_blocks] int32, on the device; entries past a request's blocks are some valid ids."""
    slot_mapping: torch.Tensor
    """[num_tokens] int64, on the device: ``block_id * block_size + offset`` of each token of this step."""
    block_size: int
    for_graph: bool = False
    """Whether metadata is wanted for a graph: see `AttentionBackend.graph_safe`."""


class AttentionBackend(ABC):
    """Stores keys and values of a step and attends over what is stored. One instance serves all layers of a group."""

    name: ClassVar[str]
    priority: ClassVar[int] = 0
    """Among backends that support a layer the highest wins."""
    quantized_kv: ClassVar[frozenset[str]] = frozenset()
    """Which of `inferplane.api.kv.QUANTIZED_KV` it stores and reads. It is asked about no layer with another."""
    graph_safe: ClassVar[bool] = False
    """Whether `forward` may be recorded in a graph, for steps in which each request has one token.

    Then `build_metadata` is also called with ``inputs.for_graph``: the tensors of these inputs stay where they are and
    get new contents before each replay; ``query_lens_host`` is 1 for each, and ``seq_lens_host`` is the longest that a
    request can get. What is built must hold for any contents, so it may keep those tensors and derive nothing from
    their values; what a step's values decide is made in `refresh_metadata`. Rows without a request have a sequence of
    length 1 in a block that nobody else uses.
    """

    keeps_latent_rows: ClassVar[bool] = False
    """Whether it keeps latents as rows: slot s of a layer with an `MLAAttentionSpec` is row s of ``kv`` seen as
    ``[num_slots, row]``, a row being the vector in kv's dtype (over the layer's scale, of fp8; with its float32 scale
    behind it, of int8).

    Then prompts for which that takes fewer products are taken off its hands: the core stores and reads their rows, and
    attends by the op ``causal_attention``. `build_metadata` and `forward` get the other requests of the step.
    """

    fuses_rotary: ClassVar[bool] = False
    """Whether it has `rotary_forward`, which then takes the place of the rotary op and `forward`."""

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        """None when the backend can serve the layer, block size included; else why not, for ``plugins explain``.

        A backend that does not know the spec's class, ``soft_cap`` or sinks must say so: the layer would be wrong.
        """

    @classmethod
    def start_compiling(cls, query: AttentionQuery) -> None:
        """For each layer that the backend was chosen for, on the thread of the worker whose device is the current one,
        before the weights are loaded: a backend whose kernels take long to compile may start that in the background.
        """
        return

    @classmethod
    @abstractmethod
    def allocate_kv(
        cls, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """The KV tensor of one layer, in the backend's own layout; ``layer.spec.block_bytes * num_blocks`` bytes.

        It may be uninitialised: a slot is written before it is read.
        """

    def build_metadata(self, inputs: AttentionInputs) -> Any:
        """Once a step and KV group, before the layers run. Whatever it returns goes to `forward` as is."""
        return inputs

    def refresh_metadata(self, metadata: Any, inputs: AttentionInputs) -> None:
        """Before each replay of a graph that was recorded with ``metadata``: ``inputs`` has the same tensors, whose
        contents of this step are queued, and this step's host lists. Changes tensors of the metadata in place."""
        return

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: torch.Tensor,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores k and v, then attends.

        Shapes: ``q: [num_tokens, num_heads, head_dim]``, ``k, v: [num_tokens, num_kv_heads, head_dim]``, ``kv`` as
        from `allocate_kv`, ``sinks: [num_heads]`` float32 exactly when the layer has them. Returns
        ``[num_tokens, num_heads, head_dim]`` in q's dtype. q, k and v are not changed.

        A layer with an `MLAAttentionSpec` attends to the stored vectors themselves: its one KV head has
        ``latent_rank + rope_dim`` numbers in k, v is the first ``latent_rank`` of them (a view of k) and is not stored,
        q is absorbed to the same size, and the result is ``[num_tokens, num_heads, latent_rank]``.
        """

    def rotary_forward(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: torch.Tensor,
        metadata: Any,
        *,
        qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward` after the norm of each head's q and k, if there is one, and the op ``rotary`` on both.

        ``qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``, q before k before v, which may be changed;
        ``positions`` and ``cos_sin`` as the op takes them; ``qk_norm`` is (weight of q, weight of k, eps), each weight
        ``[head_dim]``. Only of backends with ``fuses_rotary``.
        """
        raise NotImplementedError(f"{type(self).__name__} does not rotate: fuses_rotary is False")
