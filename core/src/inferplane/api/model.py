"""What a model is built from and what it is called with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from inferplane.api.attention import AttentionBackend, AttentionLayer
from inferplane.api.comm import Communicator
from inferplane.api.kv import EncoderAttentionSpec
from inferplane.api.latents import ExpandedPrompts
from inferplane.api.linear import LinearKernel, LinearShape
from inferplane.api.ops import OpTable
from inferplane.api.quant import QuantFormat, QuantizedLinearKernel
from inferplane.api.quantized_experts import ExpertsShape, QuantizedExpertsKernel
from inferplane.api.state import StateLayer

if TYPE_CHECKING:
    from inferplane.config import EngineConfig


@dataclass(frozen=True)
class BuildContext:
    """Everything that a model's layers ask for when they are made. The choices are made once, here."""

    config: EngineConfig
    ops: OpTable
    comm: Communicator
    device: torch.device
    dtype: torch.dtype
    choose_linear: Callable[[LinearShape], type[LinearKernel]]
    choose_attention: Callable[[AttentionLayer], AttentionBackend]
    """One instance for all layers that it serves."""
    quantization: QuantFormat | None = None
    """How the checkpoint's weights are quantized, or are to be while they are loaded."""
    choose_quantized: Callable[[LinearShape], type[QuantizedLinearKernel] | None] = lambda shape: None
    """None: nobody multiplies weights of the shape's scheme as they are, so that they are dequantized."""
    choose_experts: Callable[[ExpertsShape], type[QuantizedExpertsKernel] | None] = lambda shape: None
    """The same of the experts of a mixture."""

    @property
    def hf_config(self) -> Mapping[str, Any]:
        return self.config.model.hf_config


@dataclass(kw_only=True)
class ForwardBatch:
    """One step on the device. Passed to every layer that needs it; nothing is global."""

    token_ids: torch.Tensor
    """[num_tokens] int64"""
    positions: torch.Tensor
    """[num_tokens] int64"""
    logits_rows: torch.Tensor
    """[num_logits] int64: rows of the hidden states whose logits are wanted."""
    kv: Mapping[str, torch.Tensor]
    """KV tensor of each attention layer by name; of a state layer what `inferplane.api.state.state_views` takes."""
    metadata: Mapping[str, Any]
    """What the layer's backend built for this step, by layer name (one object for all layers of a group); of a state
    layer its `StateRound`s."""
    expanded: Mapping[str, ExpandedPrompts] = field(default_factory=dict)
    """By layer name, of layers that keep latents: the requests at the step's end that are no part of the metadata, and
    whose heads attend to keys and values of their own. No entry where there are none."""
    query_lens_host: Sequence[int] = ()
    """Tokens of each request, which lie one after another."""
    query_start: torch.Tensor | None = None
    """[num_reqs + 1] int32: the first token of each request, and the end of the last."""
    token_types: torch.Tensor | None = None
    """[num_tokens] int64: 0 for tokens of a pair's first text, 1 for those of its second; None where all are 0."""
    output_rows: torch.Tensor | None = None
    """[n] int64, fewer than the tokens: `logits_rows` and whatever pads them, where no other hidden states are wanted,
    so that the last layer's product after attention and what follows may leave the others out. A model returns these
    rows or, as ever, all. None where all are wanted."""


@dataclass(frozen=True, kw_only=True)
class EncoderLayer:
    """A layer that attends to whole sequences and keeps nothing between steps."""

    name: str
    spec: EncoderAttentionSpec


class Model(torch.nn.Module, ABC):
    """A model on one rank. Built with empty weights on ``ctx.device``, then `load_weights`, then run."""

    @abstractmethod
    def __init__(self, ctx: BuildContext, prefix: str = "") -> None:
        super().__init__()

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states ``[num_tokens, hidden_size]`` after the final norm, or only those of the batch's
        ``output_rows``, in their order."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden_size] -> [n, vocab_size]`` over the whole vocabulary on every rank; any float dtype.

        Of a model that pools, what becomes of a request's pooled hidden state: ``[n, num_labels]``, or itself.
        """

    @abstractmethod
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes a checkpoint's tensors by their Hugging Face names, in any order, shards them, and packs them.

        Raises `ModelLoadError` naming every tensor that is missing, unexpected or of the wrong shape.
        """

    @abstractmethod
    def attention_layers(self) -> list[AttentionLayer]:
        """In execution order; their specs decide the KV groups."""

    def state_layers(self) -> list[StateLayer]:
        """Layers that keep a state instead, in execution order."""
        return []

    def encoder_layers(self) -> list[EncoderLayer]:
        """Layers that attend in both directions and keep nothing, in execution order."""
        return []

    def kv_layers(self) -> list[AttentionLayer | StateLayer]:
        """Every layer that keeps something between steps."""
        return [*self.attention_layers(), *self.state_layers()]
