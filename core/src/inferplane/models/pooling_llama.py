"""Decoders of the Llama family whose last hidden states are pooled: embeddings, and classes by a ``score`` matrix."""

from __future__ import annotations

import torch

from inferplane.api.model import BuildContext
from inferplane.layers import ClassificationHead
from inferplane.models.decoder import Decoder
from inferplane.models.llama import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM


class HeadlessDecoder(Decoder):
    """Mixed into a decoder: what is pooled is the last hidden state itself."""

    def make_head(self, prefix: str) -> None:
        """There are no tokens to choose."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def own_name(self, name: str) -> str | None:
        """Checkpoints of headless classes leave the first part of the names out; others have an unused head."""
        name = name if name.startswith(("model.", "lm_head.", "score.")) else f"model.{name}"
        own = super().own_name(name)
        return None if own is None or own.startswith("lm_head.") else own


class ClassifyingDecoder(HeadlessDecoder):
    """Mixed into a decoder: a matrix gives the class logits of the last token."""

    def __init__(self, ctx: BuildContext, prefix: str = "") -> None:
        super().__init__(ctx, prefix)
        pooler = ctx.config.model.pooler
        assert pooler is not None, "a model for classification has a pooler, which names the classes"
        self.classes = ClassificationHead(
            ctx, self.shape.hidden_size, len(pooler.labels), out="score", out_bias=False
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.classes(hidden)


class LlamaModel(HeadlessDecoder, LlamaForCausalLM):
    pass


class MistralModel(HeadlessDecoder, MistralForCausalLM):
    pass


class Qwen2Model(HeadlessDecoder, Qwen2ForCausalLM):
    pass


class Qwen3Model(HeadlessDecoder, Qwen3ForCausalLM):
    pass


class LlamaForSequenceClassification(ClassifyingDecoder, LlamaForCausalLM):
    pass


class MistralForSequenceClassification(ClassifyingDecoder, MistralForCausalLM):
    pass


class Qwen2ForSequenceClassification(ClassifyingDecoder, Qwen2ForCausalLM):
    pass


class Qwen3ForSequenceClassification(ClassifyingDecoder, Qwen3ForCausalLM):
    pass
