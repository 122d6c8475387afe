"""Routers: which experts see a token, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from inferplane.api.model import BuildContext
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.linear import ReplicatedLinear
from inferplane.models.errors import ModelLoadError


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are chosen from the router's logits. Raises `ModelLoadError` for numbers that cannot go together."""

    num_experts: int
    top_k: int
    """Experts for each token."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights, after that."""
    num_groups: int = 1
    """Equal parts of the experts in order, of which only ``top_groups`` may be chosen from."""
    top_groups: int = 1
    best_of_group: int = 1
    """A group counts as much as the sum of so many of its best scores."""
    has_selection_bias: bool = False
    """Whether a learned bias is added to the scores for the choice, but not for the weights."""

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.num_experts:
            raise ModelLoadError(
                f"num_experts_per_tok {self.top_k} should be 1 to {self.num_experts}, the number of experts"
            )
        if self.num_experts % self.num_groups or not 0 < self.top_groups <= self.num_groups:
            raise ModelLoadError(
                f"{self.num_experts} experts cannot be in {self.num_groups} groups (n_group) of which "
                f"{self.top_groups} (topk_group) are chosen from"
            )
        in_groups = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > in_groups:
            raise ModelLoadError(
                f"num_experts_per_tok {self.top_k} are more than the {in_groups} in topk_group {self.top_groups} groups"
            )

    @property
    def is_plain(self) -> bool:
        """Whether the op `topk_softmax` says it all."""
        return self.score == "softmax" and self.num_groups == 1 and not self.has_selection_bias


class Router(Layer):
    """``prefix.weight`` (and ``.bias``) on every rank, and the choice from its product.

    ``dtype`` is the router's own, for models that keep theirs wider than the rest; it is never quantized.
    The selection bias is the tensor ``bias_name``. Where the configuration has ``count_expert_tokens``,
    ``num_tokens: [num_experts]`` int64 counts on the device how many tokens each expert got.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        hidden_size: int,
        routing: Routing,
        *,
        bias: bool = False,
        dtype: str | None = None,
        bias_name: str | None = None,
    ) -> None:
        self.routing = routing
        self.name = prefix
        self.num_tokens = (
            torch.zeros(routing.num_experts, dtype=torch.int64, device=ctx.device)
            if ctx.config.count_expert_tokens
            else None
        )
        self._dtype = ctx.dtype if dtype is None else getattr(torch, dtype)
        self._is_converted = self._dtype != ctx.dtype
        self.gate = ReplicatedLinear(
            replace(ctx, dtype=self._dtype, quantization=None),
            prefix,
            hidden_size,
            routing.num_experts,
            bias=bias,
        )
        self._topk_softmax = ctx.ops.topk_softmax
        self._bias_name = bias_name or f"{prefix}.e_score_correction_bias"
        self._selection_bias = (
            torch.empty(routing.num_experts, dtype=torch.float32, device=ctx.device)
            if routing.has_selection_bias
            else None
        )

    def weight_slots(self) -> Sequence[WeightSlot]:
        bias = self._selection_bias
        return [] if bias is None else [WeightSlot(self._bias_name, tuple(bias.shape), bias.copy_)]

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[num_tokens, hidden_size]`` to ``(weights float32, ids int32)``, both ``[num_tokens, top_k]``."""
        logits = self.gate(hidden.to(self._dtype) if self._is_converted else hidden)
        routing = self.routing
        if routing.is_plain:
            weights, ids = self._topk_softmax(logits, routing.top_k, routing.renormalize)
        else:
            weights, ids = choose_experts(logits, routing, self._selection_bias)
        if self.num_tokens is not None:
            chosen = ids.flatten().long()
            self.num_tokens.scatter_add_(0, chosen, torch.ones_like(chosen))
        return weights if routing.scale == 1.0 else weights * routing.scale, ids


def choose_experts(
    logits: torch.Tensor, routing: Routing, selection_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """All that `Routing` can say but ``scale``, in plain torch: the weights and ids as from `topk_softmax`.

    ``logits: [num_tokens, num_experts]``, ``selection_bias: [num_experts]``. Groups are described in arXiv:2405.04434,
    sigmoid scores with a bias in arXiv:2412.19437.
    """
    logits = logits.float()
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    ranking = scores if selection_bias is None else scores + selection_bias
    if routing.num_groups > 1:
        in_groups = ranking.unflatten(-1, (routing.num_groups, -1))
        group_scores = in_groups.topk(routing.best_of_group, dim=-1).values.sum(-1)
        chosen = group_scores.topk(routing.top_groups, dim=-1).indices
        is_closed = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, chosen, False)
        ranking = in_groups.masked_fill(is_closed.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = ranking.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if routing.renormalize:
        # scores of sigmoid may all be next to nothing
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights, ids.int()
